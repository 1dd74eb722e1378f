-- Policies of pull subscriptions. mailboat.pull itself is in store/schema/migrations/0001_schema/70_pull.sql.

-- name: declare
-- Write a policy if it changed. Relays declare policies at every start, so an unchanged one must cost no write.
insert into mailboat.pull_policies as p (
    subscription_id, columns, event_types, aggregate_types, tags_all, tags_any, tags_none, ordered, batch_size, group_by,
    max_group, max_attempts, backoff_initial, backoff_factor, backoff_max, backoff_jitter, block_when_exhausted, emit_dead_letters,
    no_handler)
values (
    %(subscription_id)s, %(columns)s::jsonb, %(event_types)s::text[], %(aggregate_types)s::text[], %(tags_all)s::text[],
    %(tags_any)s::text[], %(tags_none)s::text[], %(ordered)s, %(batch_size)s, %(group_by)s::text[], %(max_group)s,
    %(max_attempts)s, %(backoff_initial)s, %(backoff_factor)s, %(backoff_max)s, %(backoff_jitter)s, %(block_when_exhausted)s,
    %(emit_dead_letters)s, %(no_handler)s)
on conflict (subscription_id) do update
set columns = excluded.columns, event_types = excluded.event_types, aggregate_types = excluded.aggregate_types,
    tags_all = excluded.tags_all, tags_any = excluded.tags_any, tags_none = excluded.tags_none, ordered = excluded.ordered,
    batch_size = excluded.batch_size, group_by = excluded.group_by, max_group = excluded.max_group,
    max_attempts = excluded.max_attempts, backoff_initial = excluded.backoff_initial,
    backoff_factor = excluded.backoff_factor, backoff_max = excluded.backoff_max, backoff_jitter = excluded.backoff_jitter,
    block_when_exhausted = excluded.block_when_exhausted, emit_dead_letters = excluded.emit_dead_letters,
    no_handler = excluded.no_handler
where p is distinct from excluded

-- name: withdraw
delete from mailboat.pull_policies where subscription_id = %(subscription_id)s

-- name: create_functions
-- Create the sequences that count attempts (65_attempts.sql) and the functions that read events (50_windows.sql).
select mailboat.make_journals(%(subscription_id)s), mailboat.make_readers(%(subscription_id)s)
