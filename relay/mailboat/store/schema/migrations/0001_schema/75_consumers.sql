-- Functions for consumers that pull, other than reading events.

-- Record a heartbeat of a consumer process. For `idle_for`, writers notify (LISTEN mailboat; the payload is the outbox).
create function mailboat.heartbeat(subscription text, instance text, idle_for interval default '0', outbox text default null)
    returns void
    language plpgsql security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    s mailboat.subscriptions := mailboat.pull_subscription(subscription, outbox);
begin
    insert into mailboat.consumers as c (subscription_id, instance, outbox, beat_at, idle_until)
    values (s.id, heartbeat.instance, s.outbox, clock_timestamp(), clock_timestamp() + least(idle_for, interval '5 minutes'))
    on conflict on constraint consumers_pkey do update
    set beat_at = excluded.beat_at, idle_until = excluded.idle_until, outbox = excluded.outbox;
    delete from mailboat.consumers c where c.subscription_id = s.id and c.beat_at < clock_timestamp() - interval '1 hour';
end
$$;

-- Deregister a consumer process that drained before it stopped.
create function mailboat.leave(subscription text, instance text, outbox text default null) returns void
    language plpgsql security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    s mailboat.subscriptions := mailboat.pull_subscription(subscription, outbox);
begin
    delete from mailboat.consumers c where c.subscription_id = s.id and c.instance = leave.instance;
end
$$;

-- Create time partitions ahead, for an outbox without a relay, and return their number. Delete refusals older than 30 days.
create function mailboat.maintain(subscription text, outbox text default null) returns integer
    language plpgsql security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    s mailboat.subscriptions := mailboat.pull_subscription(subscription, outbox);
begin
    delete from mailboat.refusals r where r.subscription_id = s.id and r.last_at < clock_timestamp() - interval '30 days';
    if (select relkind from pg_class where oid = to_regclass(s.outbox)) = 'p' then
        return mailboat.ensure_partitions(s.outbox);
    end if;
    return 0;
end
$$;

-- Settings that a consumer kit reads at its start instead of a manifest.
create function mailboat.consumer_settings(subscription text, outbox text default null) returns jsonb
    language plpgsql security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    s mailboat.subscriptions := mailboat.pull_subscription(subscription, outbox);
    p mailboat.pull_policies := mailboat.pull_policy(s);
begin
    return jsonb_build_object(
        'outbox', s.outbox, 'state', s.state, 'partitions', s.partitions, 'batchSize', p.batch_size, 'groupBy', p.group_by,
        'maxAttempts', p.max_attempts, 'noHandler', p.no_handler,
        'isOwner', pg_has_role(mailboat.caller(), (select nspowner from pg_namespace where nspname = 'mailboat'), 'usage'));
end
$$;

-- The lag of a pull subscription: matching events that no cursor has passed (counted up to `most`), the age of the oldest one in
-- seconds, parked events, and dead letters that were not replayed.
create function mailboat.pull_lag(
    subscription text, most integer default 10000, outbox text default null,
    out pending bigint, out bounded boolean, out oldest double precision, out parked bigint, out dead bigint
)
    language plpgsql security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
    set enable_seqscan = off
    set enable_bitmapscan = off
as $$
declare
    s mailboat.subscriptions := mailboat.pull_subscription(subscription, outbox);
    p mailboat.pull_policies := mailboat.pull_policy(s);
begin
    execute format($lag$
        with mine as materialized (
            select m.partition, m.settled_snapshot, m.window_snapshot, m.position, m.previous_layout
            from mailboat.cursors m where m.subscription_id = $1
        ), edge as materialized (
            select min(pg_snapshot_xmax(settled_snapshot)::text::numeric)::text::xid8 as xmax from mine
        ), found as (
            select e.id, e.xid, e.slot, e.created_at, e.event_type, e.aggregate_type, e.tags from %1$s as e
            where e.xid = any (array(select distinct pg_snapshot_xip(settled_snapshot) from mine))
              and e.xid < (select xmax from edge)
            union all
            select e.id, e.xid, e.slot, e.created_at, e.event_type, e.aggregate_type, e.tags from %1$s as e
            where e.xid >= (select xmax from edge)
            limit $2
        ), looked_at as (
            select e.created_at,
                   mine.partition is not null and not pg_visible_in_snapshot(e.xid, mine.settled_snapshot)
                   and not coalesce(pg_visible_in_snapshot(e.xid, mine.window_snapshot) and e.id <= mine.position, false)
                   and not coalesce(mailboat.settled_before(mine.previous_layout, e.slot, e.xid, e.id), false)
                   and %3$s as waits
            from found as e left join mine on mine.partition = e.slot %% %2$s
            offset 0
        )
        select count(*) filter (where waits), count(*) >= $2,
               extract(epoch from clock_timestamp() - min(created_at) filter (where waits and isfinite(created_at)))::float8
        from looked_at$lag$, mailboat.pull_rows(s.outbox, p.columns), s.partitions, mailboat.pull_predicate(s, p))
    using s.id, most
    into pending, bounded, oldest;
    select count(*) into parked from mailboat.parked m where m.subscription_id = s.id;
    select count(*) into dead from mailboat.dead_letters m where m.subscription_id = s.id and m.replayed_at is null;
end
$$;
