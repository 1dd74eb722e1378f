-- Wake-up of idle relays and consumers. Writers notify only while one is idle.

-- Create the wake-up sequence of an outbox. Its value is the time until which writers notify, in milliseconds since 1970. No
-- value: no relay and no consumer is idle. A sequence, because a writer reads it without a query and a snapshot, gets the newest
-- value at any isolation level, and scans no dead row versions while an old snapshot is open.
create function mailboat.create_wakeup_sequence() returns trigger
    language plpgsql security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    execute format('create sequence if not exists mailboat.wakeup_%s as bigint minvalue 0 start 0', mailboat.key_slot(new.name, 0));
    -- The condition of a trigger is evaluated with the rights of the writer.
    execute format('grant select on sequence mailboat.wakeup_%s to public', mailboat.key_slot(new.name, 0));
    return null;
end
$$;

create trigger wakeup after insert on mailboat.outboxes for each row execute function mailboat.create_wakeup_sequence();

-- Set the wake-up sequences of the outboxes whose relays or consumers were written: heartbeats, requests for NOTIFY, and their
-- end. Only live relays count: a relay that was killed while idle leaves its row behind, and every later commit would notify. The
-- function takes no lock, so that a hung relay delays no other one. If two requests change at once, the value may miss one of
-- them until its next heartbeat. The name of the trigger sorts after rights_*, so a statement without rights fails before this
-- trigger runs.
create function mailboat.set_wakeup() returns trigger
    language plpgsql security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    name     text;
    deadline timestamptz;
    until    bigint;
    sequence regclass;
begin
    for name in select distinct c.outbox from changed c loop
        deadline := greatest(
            (select max(r.expires_at) from mailboat.wakeup_requests d join mailboat.relays r on r.id = d.relay
             where d.outbox = name and d.active),
            (select max(c.idle_until) from mailboat.consumers c where c.outbox = name));
        until := case when deadline > clock_timestamp()
                      then ceil(1000 * extract(epoch from least(deadline, clock_timestamp() + interval '5 minutes')))
                      else 0 end;
        sequence := to_regclass(format('mailboat.wakeup_%s', mailboat.key_slot(name, 0)));
        if coalesce(pg_sequence_last_value(sequence), 0) <> until then
            perform setval(sequence, until, until > 0);  -- 0 leaves the sequence without a value
        end if;
    end loop;
    return null;
end
$$;

do $$
declare
    written text;
begin
    foreach written in array array['relays', 'wakeup_requests', 'consumers'] loop
        execute format('create trigger wakeup_insert after insert on mailboat.%I referencing new table as changed'
                       ' for each statement execute function mailboat.set_wakeup()', written);
        execute format('create trigger wakeup_update after update on mailboat.%I referencing new table as changed'
                       ' for each statement execute function mailboat.set_wakeup()', written);
        execute format('create trigger wakeup_delete after delete on mailboat.%I referencing old table as changed'
                       ' for each statement execute function mailboat.set_wakeup()', written);
    end loop;
end
$$;

-- Notify the relays and consumers of an outbox. A failure must never affect the business transaction (guarantee G10), so every
-- error is ignored. If the notification queue is filling up, nothing is sent, because a full queue would fail commits. Relays and
-- consumers poll as well, so a lost notification costs only time.
create function mailboat.notify_idle(outbox text) returns void
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
begin
    if pg_notification_queue_usage() <= 0.1 then
        perform pg_notify('mailboat', outbox);
    end if;
exception when others then
    null;
end
$$;

-- The trigger of every outbox. Arguments: the name of the outbox, and the name of its wake-up sequence (optional). The function
-- can't fail, and it waits only while the sequence is being altered.
create function mailboat.notify_on_insert() returns trigger
    language plpgsql security definer
as $$
declare
    until bigint := pg_catalog.pg_sequence_last_value(pg_catalog.to_regclass(
        coalesce(tg_argv[1], 'mailboat.wakeup_' operator(pg_catalog.||) mailboat.key_slot(tg_argv[0], 0)::text)));
begin
    if until operator(pg_catalog.>) 0 then
        if until operator(pg_catalog.>) (1000 operator(pg_catalog.*) pg_catalog.date_part('epoch', pg_catalog.clock_timestamp())) then
            perform mailboat.notify_idle(tg_argv[0]);
        end if;
    end if;
    return null;
end
$$;
