-- Writing events from any language: mailboat.emit(...) and mailboat.emit_many(...), in the caller's own transaction.
-- They run with the caller's rights (see mailboat_writer in 0004), and refuse with SQLSTATE 22023 what must not enter the
-- outbox, naming the argument: where the application can see it, not later in a relay. mailboat/emitting.py holds the same
-- rules for Python; tests/emit/test_same_rules.py holds the two to one another.

create function mailboat.refuse(argument text, complaint text) returns void
    language plpgsql immutable
as $$
begin
    raise exception 'mailboat.emit: % %', argument, complaint using errcode = 'invalid_parameter_value';
end
$$;

create function mailboat.is_json(content_type text) returns boolean
    language sql immutable parallel safe
    return content_type ~* '^([^;]*[/+])json *(;|$)';

-- Raises when an event is not well formed. Everything but the payload: that is the business of what made it bytes.
create function mailboat.check_event(
    event_type text, aggregate_type text, aggregate_id text, key text, content_type text, headers jsonb, tags text[],
    traceparent text, ordered boolean
) returns void
    language plpgsql immutable
as $$
declare
    control constant text := '[\x01-\x1f\x7f]';
    name  text;
    value jsonb;
    tag   text;
begin
    if event_type is null or event_type = '' then
        perform mailboat.refuse('event_type', 'must not be empty');
    elsif length(event_type) > 255 then
        perform mailboat.refuse('event_type', format('has %s characters, the limit is 255', length(event_type)));
    elsif event_type ~ control then
        perform mailboat.refuse('event_type', 'must not contain control characters');
    end if;

    if aggregate_type = '' or length(aggregate_type) > 255 or aggregate_type ~ control then
        perform mailboat.refuse('aggregate_type', 'must have 1 to 255 characters and no control characters');
    end if;
    if aggregate_id = '' or octet_length(aggregate_id) > 1024 then
        perform mailboat.refuse('aggregate_id', 'must have 1 to 1024 bytes');
    end if;

    if key = '' then
        perform mailboat.refuse('key', 'must not be empty: leave it out to keep the order of aggregate_id, or say ordered => false');
    elsif octet_length(key) > 1024 then
        perform mailboat.refuse('key', format('has %s bytes, the limit is 1024', octet_length(key)));
    elsif key is not null and not ordered then
        perform mailboat.refuse('key', 'and ordered => false contradict each other');
    end if;

    if content_type !~ '^[A-Za-z0-9!#$&^_.+-]+/[A-Za-z0-9!#$&^_.+-]+ *(;[\x20-\x7e]*)?$' or length(content_type) > 255 then
        perform mailboat.refuse('content_type', 'must be a media type such as application/json');
    end if;

    if headers is not null then
        if jsonb_typeof(headers) <> 'object' then
            perform mailboat.refuse('headers', 'must be an object of strings');
        end if;
        if (select count(*) from jsonb_object_keys(headers)) > 64 then
            perform mailboat.refuse('headers', 'must be 64 at most');
        end if;
        for name, value in select h.key, h.value from jsonb_each(headers) h loop
            if name !~ '^[A-Za-z0-9._-]{1,128}$' then
                perform mailboat.refuse('headers', format('contain the name %s: use 1 to 128 of A-Z a-z 0-9 . _ -', to_json(left(name, 128))));
            elsif name ~* '^(mailboat-|ce[_-])' or lower(name) in ('event_id', 'event_type', 'aggregate_type', 'aggregate_id',
                'created_at', 'partitionkey', 'traceparent', 'content-type') then
                perform mailboat.refuse('headers', format('contain the name %s, which Mailboat sets itself', name));
            elsif jsonb_typeof(value) <> 'string' then
                perform mailboat.refuse('headers.' || name, 'must be a string');
            elsif octet_length(value #>> '{}') > 4096 then
                perform mailboat.refuse('headers.' || name, 'has more than 4096 bytes');
            elsif value #>> '{}' ~ control then
                perform mailboat.refuse('headers.' || name, 'must not contain control characters');
            end if;
        end loop;
    end if;

    if cardinality(tags) > 64 then
        perform mailboat.refuse('tags', 'must be 64 at most');
    end if;
    foreach tag in array coalesce(tags, '{}') loop
        if tag is null or tag = '' or length(tag) > 128 or tag ~ control then
            perform mailboat.refuse('tags', 'must each have 1 to 128 characters and no control characters');
        end if;
    end loop;

    if traceparent !~ '^[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}$' or traceparent ~ '^(ff|..-0{32}|.{35}-0{16})' then
        perform mailboat.refuse('traceparent', 'must be a W3C trace context: 00-<32 hex digits>-<16 hex digits>-<2 hex digits>');
    end if;
end
$$;

-- All ways in end here, or in emit_many.
create function mailboat.emit_bytes(
    event_type text, payload bytea, content_type text, aggregate_type text, aggregate_id text, key text, event_id uuid,
    headers jsonb, tags text[], traceparent text, ordered boolean, outbox text
) returns uuid
    language plpgsql
as $$
declare
    target regclass := to_regclass(outbox);
    chosen uuid := coalesce(event_id, gen_random_uuid());  -- not RETURNING: a writer may not read the outbox
begin
    if target is null then
        perform mailboat.refuse('outbox', format('%s does not exist; make it: select mailboat.create_outbox(%L)', outbox, outbox));
    end if;
    ordered := coalesce(ordered, true);
    perform mailboat.check_event(event_type, aggregate_type, aggregate_id, key, content_type, headers, tags, traceparent, ordered);
    if octet_length(payload) > 16777216 then
        perform mailboat.refuse('payload', format('has %s bytes, the limit is 16 MiB: send a reference to it instead', octet_length(payload)));
    end if;
    execute format('insert into %s (event_id, event_type, aggregate_type, aggregate_id, key, payload, content_type, headers, tags,'
                   ' traceparent) values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)', target)
        using chosen, event_type, aggregate_type, aggregate_id, case when ordered then coalesce(key, aggregate_id) end, payload,
              content_type, nullif(headers, '{}'), coalesce(tags, '{}'), traceparent;
    return chosen;
end
$$;

create function mailboat.emit(
    event_type text, payload jsonb, aggregate_type text default null, aggregate_id text default null, key text default null,
    event_id uuid default null, content_type text default null, headers jsonb default null, tags text[] default '{}',
    traceparent text default null, ordered boolean default true, outbox text default 'mailboat.outbox'
) returns uuid
    language sql
    return mailboat.emit_bytes(event_type, convert_to(payload::text, 'UTF8'), coalesce(content_type, 'application/json'),
        aggregate_type, aggregate_id, key, event_id, headers, tags, traceparent, ordered, outbox);

-- json keeps its text as written, and so does Mailboat.
create function mailboat.emit(
    event_type text, payload json, aggregate_type text default null, aggregate_id text default null, key text default null,
    event_id uuid default null, content_type text default null, headers jsonb default null, tags text[] default '{}',
    traceparent text default null, ordered boolean default true, outbox text default 'mailboat.outbox'
) returns uuid
    language sql
    return mailboat.emit_bytes(event_type, convert_to(payload::text, 'UTF8'), coalesce(content_type, 'application/json'),
        aggregate_type, aggregate_id, key, event_id, headers, tags, traceparent, ordered, outbox);

create function mailboat.emit(
    event_type text, payload bytea, aggregate_type text default null, aggregate_id text default null, key text default null,
    event_id uuid default null, content_type text default null, headers jsonb default null, tags text[] default '{}',
    traceparent text default null, ordered boolean default true, outbox text default 'mailboat.outbox'
) returns uuid
    language sql
    return mailboat.emit_bytes(event_type, payload, coalesce(content_type, 'application/octet-stream'),
        aggregate_type, aggregate_id, key, event_id, headers, tags, traceparent, ordered, outbox);

-- What an untyped literal or parameter ends up in. It is JSON unless content_type says otherwise, and then it must be.
create function mailboat.emit(
    event_type text, payload text, aggregate_type text default null, aggregate_id text default null, key text default null,
    event_id uuid default null, content_type text default null, headers jsonb default null, tags text[] default '{}',
    traceparent text default null, ordered boolean default true, outbox text default 'mailboat.outbox'
) returns uuid
    language plpgsql
as $$
begin
    content_type := coalesce(content_type, 'application/json');
    if mailboat.is_json(content_type) then
        begin
            perform payload::json;
        exception when data_exception then
            perform mailboat.refuse('payload', 'is not JSON: say content_type => ''text/plain'' for other text');
        end;
    end if;
    return mailboat.emit_bytes(event_type, convert_to(payload, 'UTF8'), content_type,
        aggregate_type, aggregate_id, key, event_id, headers, tags, traceparent, ordered, outbox);
end
$$;

-- Many at once, in one statement: an array of objects whose fields are named as the arguments of mailboat.emit. The
-- payload is any JSON (with another content_type: a string, sent as its text); none, or null, is a tombstone.
-- Returns the event ids in the same order.
create function mailboat.emit_many(events jsonb, outbox text default 'mailboat.outbox') returns setof uuid
    language plpgsql
as $$
declare
    target regclass := to_regclass(outbox);
    strange text;
    chosen uuid[];
begin
    if target is null then
        perform mailboat.refuse('outbox', format('%s does not exist; make it: select mailboat.create_outbox(%L)', outbox, outbox));
    elsif jsonb_typeof(events) is distinct from 'array' then
        perform mailboat.refuse('events', 'must be an array of objects');
    elsif exists (select from jsonb_array_elements(events) e where jsonb_typeof(e) <> 'object') then
        perform mailboat.refuse('events', 'must be an array of objects');
    end if;
    select f.field into strange
    from jsonb_array_elements(events) e, jsonb_object_keys(e) f(field)
    where f.field not in ('event_type', 'payload', 'aggregate_type', 'aggregate_id', 'key', 'event_id', 'content_type', 'headers',
                          'tags', 'traceparent', 'ordered')
    limit 1;
    if found then
        perform mailboat.refuse('events', format('have no field %s', to_json(strange)));
    end if;

    -- Read once and kept as rows: the ids must be the same in the check, in the insert and in the answer.
    chosen := array(
        select coalesce((e.event ->> 'event_id')::uuid, gen_random_uuid())
        from jsonb_array_elements(events) with ordinality e(event, ordinal) order by e.ordinal);

    perform mailboat.check_event(r.event_type, r.aggregate_type, r.aggregate_id, r.key, coalesce(r.content_type, 'application/json'),
                                 nullif(r.headers, 'null'), r.tags, r.traceparent, coalesce(r.ordered, true))
    from jsonb_to_recordset(events) r(event_type text, aggregate_type text, aggregate_id text, key text, content_type text,
                                      headers jsonb, tags text[], traceparent text, ordered boolean);
    perform case
        when not mailboat.is_json(coalesce(r.content_type, 'application/json')) and jsonb_typeof(r.payload) not in ('string', 'null')
            then mailboat.refuse('payload', format('must be a string with content_type %s', r.content_type))
        when octet_length(r.payload::text) > 16777216
            then mailboat.refuse('payload', format('has %s bytes, the limit is 16 MiB: send a reference to it instead', octet_length(r.payload::text)))
    end
    from jsonb_to_recordset(events) r(content_type text, payload jsonb);

    execute format($insert$
        insert into %s (event_id, event_type, aggregate_type, aggregate_id, key, payload, content_type, headers, tags, traceparent)
        select $2[o.ordinal], r.event_type, r.aggregate_type, r.aggregate_id,
               case when coalesce(r.ordered, true) then coalesce(r.key, r.aggregate_id) end,
               convert_to(case when mailboat.is_json(t.content_type) then nullif(r.payload, 'null')::text else r.payload #>> '{}' end, 'UTF8'),
               t.content_type, nullif(nullif(r.headers, 'null'), '{}'), coalesce(r.tags, '{}'), r.traceparent
        from jsonb_array_elements($1) with ordinality o(event, ordinal),
             jsonb_to_record(o.event) r(event_type text, payload jsonb, aggregate_type text, aggregate_id text, key text,
                                        content_type text, headers jsonb, tags text[], traceparent text, ordered boolean),
             lateral (select coalesce(r.content_type, 'application/json') as content_type) t
        order by o.ordinal$insert$, target) using events, chosen;
    return query select unnest(chosen);
end
$$;
