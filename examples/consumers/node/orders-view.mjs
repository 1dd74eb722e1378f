// A consumer of shop/orders-view: pull, work and commit in one transaction.
import pg from "pg";

const client = new pg.Client({ connectionString: process.argv[2] });
await client.connect();
while (await handleBatch());
await client.end();

// Effects and progress commit together, or not at all. False: nothing is left.
async function handleBatch() {
  await client.query("begin");
  const { rows } = await client.query("select event_id, payload from mailboat.pull('shop/orders-view', 100)");
  for (const event of rows) {
    try {
      await project(event);
    } catch (failure) {
      await client.query("rollback");
      await client.query("select mailboat.refuse('shop/orders-view', $1, $2)", [event.event_id, failure.message]);
      return true;
    }
  }
  await client.query("commit");
  return rows.length > 0;
}

async function project(event) {
  const order = JSON.parse(event.payload.toString());
  if (order.number < 0) throw new Error(`number ${order.number} is negative`);
  await client.query("insert into orders_view (event_id, number) values ($1, $2)", [event.event_id, order.number]);
}
