-- Wake-up of idle relays and consumers. Writers notify only while one is idle.

-- The value of an outbox's wake-up sequence is the time until which its writers notify, in milliseconds since 1970; 0 or none: no
-- relay and no consumer is idle. A sequence, because a writer reads it without a query and a snapshot, gets the newest value at any
-- isolation level, and walks no dead row versions while an old snapshot is open.
create function mailboat.create_wakeup_sequence() returns trigger
    language plpgsql security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    execute format('create sequence if not exists mailboat.wakeup_%s as bigint minvalue 0 start 0', mailboat.key_slot(new.name, 0));
    return null;
end
$$;

create trigger wakeup after insert on mailboat.outboxes for each row execute function mailboat.create_wakeup_sequence();

-- Sets the wake-up sequences of the outboxes whose relays or consumers were written: heartbeats, requests for NOTIFY and their end.
-- Only a live relay counts: one that was killed while idle leaves its row behind, and every later commit would notify.
-- It takes no lock, so that a hung relay delays no other. If two relays change their minds at once, the value may miss one of them
-- until its next heartbeat. Its name sorts behind rights_*: a statement without rights has failed by then.
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
            perform setval(sequence, until);
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

-- Notifies relays and consumers of an outbox. It must never hurt the business transaction it runs in (guarantee G10): whatever goes
-- wrong is swallowed, and a queue that fills up is left alone (a full one would fail commits). Polling is the truth; a notification
-- that gets lost costs time only.
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

-- The trigger of every outbox, with its name as the first argument, and that of its sequence as the second (it may be left out).
-- Nothing here can fail or wait unless the sequence is altered just then.
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
