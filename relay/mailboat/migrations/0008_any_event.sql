-- Whatever an outbox may hold can be set aside: else settling it fails, again and again, and everything waits behind it.

-- The queue of a key is found by a hash of the key: a long one does not fit into an index.
create index parked_queue on mailboat.parked (subscription_id, partition, mailboat.key_slot(key, 0), rank, ordinal);
drop index mailboat.parked_key;

-- Headers as they are kept. Of a table's own column of type json, jsonb can't hold all that it may have in it (a NUL, half a
-- character, a number beyond all bounds): that is kept as text, a string.
create function mailboat.kept_headers(headers text) returns jsonb
    language plpgsql immutable strict parallel safe
    set search_path = pg_catalog, pg_temp
as $$
begin
    return headers::jsonb;
exception when others then
    return to_jsonb(headers);
end
$$;
