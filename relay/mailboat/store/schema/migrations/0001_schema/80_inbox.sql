-- Consumers behind a broker: marks of handled events (mailboat.once), and attempts that survive a crash of the process.

-- Mark an event as handled, in the caller's transaction. Return true if it is new to the consumer and must be handled, false if
-- it was handled before. For consumers whose events come from another source than mailboat.pull.
create function mailboat.once(consumer text, event_id uuid) returns boolean
    language plpgsql security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    perform mailboat.check_consumer(consumer, '');
    insert into mailboat.handled (consumer, event_id) values (once.consumer, once.event_id)
    on conflict on constraint handled_pkey do nothing;
    return found;
end
$$;

-- Delete a mark of mailboat.once, so that the event is handled again. Return true if there was one.
create function mailboat.forget(consumer text, event_id uuid) returns boolean
    language plpgsql security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    perform mailboat.check_consumer(consumer, '');
    delete from mailboat.handled h where h.consumer = forget.consumer and h.event_id = forget.event_id;
    return found;
end
$$;

-- Delete marks of mailboat.once, and attempts of an inbox, that are older than any possible redelivery: the oldest, up to `most`.
-- Return their number; fewer than `most` means that none is left.
create function mailboat.prune_handled(consumer text, older_than interval default '30 days', most integer default 10000)
    returns bigint
    language plpgsql security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    pruned bigint;
    more   bigint;
begin
    perform mailboat.check_consumer(consumer, '');
    delete from mailboat.handled h
    where h.ctid = any (array(select o.ctid from mailboat.handled o
                              where o.consumer = prune_handled.consumer and o.handled_at < clock_timestamp() - older_than
                              order by o.handled_at limit most for update skip locked));
    get diagnostics pruned = row_count;
    delete from mailboat.inbox_attempts a
    where a.ctid = any (array(select o.ctid from mailboat.inbox_attempts o
                              where o.consumer = prune_handled.consumer and o.changed_at < clock_timestamp() - older_than
                              order by o.changed_at limit most - pruned for update skip locked));
    get diagnostics more = row_count;
    return pruned + more;
end
$$;

-- Claim events and record them as running. Return for each its state (claimed, done, dead or wait) and its attempt. `running`:
-- the events that the process is handling already. `replays`: those of `event_ids` that are replayed dead letters. In a race, two
-- processes may claim the same event at once: mailboat.once makes one of them wait for the other.
create function mailboat.inbox_claim(
    consumer text, instance text, incarnation text, lease interval, running uuid[], event_ids uuid[], replays uuid[],
    out event_id uuid, out state text, out attempt integer, out deaths integer, out wait double precision
) returns setof record
    language plpgsql security definer
    set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
begin
    perform mailboat.check_consumer(inbox_claim.consumer, '');
    -- Delete holders that died, and earlier incarnations of this one. Rows are locked in a fixed order, so that concurrent calls
    -- do not deadlock.
    with gone as (
        delete from mailboat.inbox_holders h
        where h.ctid = any (array(
            select o.ctid from mailboat.inbox_holders o
            where o.consumer = inbox_claim.consumer
              and (o.instance <> inbox_claim.instance and o.expires_at < clock_timestamp()
                   or o.instance = inbox_claim.instance and o.incarnation < inbox_claim.incarnation)
            order by o.instance, o.incarnation
            for update))
        returning h.running
    )
    insert into mailboat.inbox_attempts as a (consumer, event_id, attempts, deaths)
    select inbox_claim.consumer, e.id, count(*), count(*)
    from gone, unnest(gone.running) e(id)
    where not exists (select from mailboat.handled d where d.consumer = inbox_claim.consumer and d.event_id = e.id)
    group by e.id
    on conflict on constraint inbox_attempts_pkey do update
    set attempts = a.attempts + excluded.attempts, deaths = a.deaths + excluded.deaths, changed_at = clock_timestamp()
    where not a.dead;

    update mailboat.inbox_attempts a
    set attempts = 0, deaths = 0, dead = false, due_at = null, changed_at = clock_timestamp()
    where a.consumer = inbox_claim.consumer and a.event_id = any (inbox_claim.replays) and a.dead;

    return query
    with answered as materialized (
        select q.id, q.ordinal, coalesce(a.attempts, 0) + 1 as attempt, coalesce(a.deaths, 0) as deaths,
               case when d.event_id is not null then 'done'
                    when a.dead then 'dead'
                    when a.due_at > clock_timestamp() or o.expires_at is not null then 'wait'
                    else 'claimed' end as state,
               extract(epoch from greatest(a.due_at, o.expires_at) - clock_timestamp())::float8 as wait
        from unnest(inbox_claim.event_ids) with ordinality q(id, ordinal)
        left join mailboat.handled d on d.consumer = inbox_claim.consumer and d.event_id = q.id
        left join mailboat.inbox_attempts a on a.consumer = inbox_claim.consumer and a.event_id = q.id
        left join lateral (
            select max(h.expires_at) as expires_at from mailboat.inbox_holders h
            where h.consumer = inbox_claim.consumer and h.instance <> inbox_claim.instance
              and h.expires_at > clock_timestamp() and q.id = any (h.running)
        ) o on true
    ), noted as (
        insert into mailboat.inbox_holders as h (consumer, instance, incarnation, expires_at, running)
        select inbox_claim.consumer, inbox_claim.instance, inbox_claim.incarnation, clock_timestamp() + inbox_claim.lease,
               inbox_claim.running || array(select n.id from answered n where n.state = 'claimed')
        on conflict on constraint inbox_holders_pkey do update set expires_at = excluded.expires_at, running = excluded.running
    )
    select n.id, n.state, n.attempt, n.deaths, greatest(n.wait, 0) from answered n order by n.ordinal;
end
$$;

-- Renew the claims of a process. `running` is used if another process has expired this one in the meantime.
create function mailboat.inbox_renew(consumer text, instance text, incarnation text, lease interval, running uuid[]) returns void
    language plpgsql security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    perform mailboat.check_consumer(consumer, '');
    insert into mailboat.inbox_holders as h (consumer, instance, incarnation, expires_at, running)
    values (inbox_renew.consumer, inbox_renew.instance, inbox_renew.incarnation, clock_timestamp() + lease, inbox_renew.running)
    on conflict on constraint inbox_holders_pkey do update set expires_at = excluded.expires_at;
end
$$;

-- Record events that were not handled: the number of attempts that count, and the time of the next one. Attempts never decrease.
create function mailboat.inbox_fail(
    consumer text, instance text, incarnation text, event_ids uuid[], attempts integer[], deaths integer[],
    retry_in double precision[], dead boolean
) returns void
    language plpgsql security definer
    set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
begin
    perform mailboat.check_consumer(inbox_fail.consumer, '');
    insert into mailboat.inbox_attempts as a (consumer, event_id, attempts, deaths, due_at, dead)
    select inbox_fail.consumer, e.id, e.attempts, e.deaths, clock_timestamp() + make_interval(secs => e.retry_in), inbox_fail.dead
    from unnest(inbox_fail.event_ids, inbox_fail.attempts, inbox_fail.deaths, inbox_fail.retry_in) e(id, attempts, deaths, retry_in)
    where e.attempts > 0 or e.retry_in > 0 or inbox_fail.dead
    order by e.id
    on conflict on constraint inbox_attempts_pkey do update
    set attempts = greatest(a.attempts, excluded.attempts), deaths = greatest(a.deaths, excluded.deaths),
        due_at = excluded.due_at, dead = a.dead or excluded.dead, changed_at = clock_timestamp();
    update mailboat.inbox_holders h
    set running = array(select r from unnest(h.running) r where r <> all (inbox_fail.event_ids))
    where h.consumer = inbox_fail.consumer and h.instance = inbox_fail.instance and h.incarnation = inbox_fail.incarnation;
end
$$;

-- Delete the attempts of events that were handled after a failure.
create function mailboat.inbox_done(consumer text, event_ids uuid[]) returns void
    language plpgsql security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    perform mailboat.check_consumer(consumer, '');
    delete from mailboat.inbox_attempts a
    where a.consumer = inbox_done.consumer and a.event_id = any (inbox_done.event_ids) and not a.dead;
end
$$;

-- Deregister a process that drained before it stopped.
create function mailboat.inbox_leave(consumer text, instance text, incarnation text) returns void
    language plpgsql security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    perform mailboat.check_consumer(consumer, '');
    delete from mailboat.inbox_holders h
    where h.consumer = inbox_leave.consumer and h.instance = inbox_leave.instance and h.incarnation = inbox_leave.incarnation;
end
$$;
