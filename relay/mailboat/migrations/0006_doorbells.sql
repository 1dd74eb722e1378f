-- A doorbell rings for a relay that is alive, and for no other. One that was killed in its sleep leaves its doorbell hanging
-- out; where no other relay lives to take it in, every commit would ring for ever, and none could be prepared (guarantee G10).

create or replace function mailboat.ring() returns trigger
    language plpgsql security definer
    set search_path = pg_catalog, pg_temp
    set lock_timeout = '50ms'
as $$
begin
    if exists (select
               from mailboat.doorbells d join mailboat.relays r on r.id = d.relay
               where d.outbox = tg_argv[0] and d.rings and r.expires_at > clock_timestamp())
       and pg_notification_queue_usage() <= 0.1
    then
        perform pg_notify('mailboat', tg_argv[0]);
    end if;
    return null;
exception when others then
    return null;
end
$$;

alter table mailboat.relays set (vacuum_truncate = off);  -- writers look here now, and truncating would lock them out
