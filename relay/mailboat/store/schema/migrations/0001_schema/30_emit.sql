-- Writing events from any language: mailboat.emit(...) and mailboat.emit_many(...), in the caller's transaction. These functions
-- run with the caller's rights (see mailboat_writer in 90_rights.sql). They refuse an event that must not enter the outbox with
-- SQLSTATE 22023, and name the argument, so that the application gets the error and not a relay later.
-- mailboat/emitter/validation.py has the same rules for Python; tests/emit/test_same_rules.py compares the two.

create function mailboat.invalid_argument(argument text, complaint text) returns void
    language plpgsql immutable
    set search_path = pg_catalog, pg_temp
as $$
begin
    raise exception 'mailboat.emit: % %', argument, complaint using errcode = 'invalid_parameter_value';
end
$$;

create function mailboat.is_json(content_type text) returns boolean
    language sql immutable parallel safe
    return content_type ~* '^([^;]*[/+])json *(;|$)';

-- Return true, or raise if an event is not well formed. The payload is not checked here: the function that converts it to bytes
-- does that. The search path is that of the callers, each of which sets one. The function returns a value, so that a caller can
-- use it in an expression: PERFORM would run a query.
create function mailboat.check_event(
    event_type text, aggregate_type text, aggregate_id text, key text, content_type text, headers jsonb, tags text[],
    traceparent text, ordered boolean
) returns boolean
    language plpgsql immutable
as $$
declare
    control constant text := '[\x01-\x1f\x7f]';
    name  text;
    value jsonb;
    tag   text;
    extra integer := 0;  -- bytes of headers and tags
begin
    if event_type is null or event_type = '' then
        perform mailboat.invalid_argument('event_type', 'must not be empty');
    elsif length(event_type) > 255 then
        perform mailboat.invalid_argument('event_type', format('has %s characters, the limit is 255', length(event_type)));
    elsif event_type ~ control then
        perform mailboat.invalid_argument('event_type', 'must not contain control characters');
    end if;

    if aggregate_type = '' or length(aggregate_type) > 255 or aggregate_type ~ control then
        perform mailboat.invalid_argument('aggregate_type', 'must have 1 to 255 characters and no control characters');
    end if;
    if aggregate_id = '' or octet_length(aggregate_id) > 1024 then
        perform mailboat.invalid_argument('aggregate_id', 'must have 1 to 1024 bytes');
    end if;

    if key = '' then
        perform mailboat.invalid_argument('key', 'must not be empty: leave it out to keep the order of aggregate_id, or say ordered => false');
    elsif octet_length(key) > 1024 then
        perform mailboat.invalid_argument('key', format('has %s bytes, the limit is 1024', octet_length(key)));
    elsif key is not null and not ordered then
        perform mailboat.invalid_argument('key', 'and ordered => false contradict each other');
    end if;

    if content_type !~ '^[A-Za-z0-9!#$&^_.+-]+/[A-Za-z0-9!#$&^_.+-]+ *(;[\x20-\x7e]*)?$' or length(content_type) > 255 then
        perform mailboat.invalid_argument('content_type', 'must be a media type such as application/json');
    end if;

    if headers is not null then
        if jsonb_typeof(headers) <> 'object' then
            perform mailboat.invalid_argument('headers', 'must be an object of strings');
        end if;
        if (select count(*) from jsonb_object_keys(headers)) > 64 then
            perform mailboat.invalid_argument('headers', 'must be 64 at most');
        end if;
        for name, value in select h.key, h.value from jsonb_each(headers) h loop
            if name !~ '^[A-Za-z0-9._-]{1,128}$' then
                perform mailboat.invalid_argument('headers', format('contain the name %s: use 1 to 128 of A-Z a-z 0-9 . _ -', to_json(left(name, 128))));
            elsif name ~* '^(mailboat-|ce[_-])' or lower(name) in ('event_id', 'event_type', 'aggregate_type', 'aggregate_id',
                'created_at', 'partitionkey', 'traceparent', 'content-type') then
                perform mailboat.invalid_argument('headers', format('contain the name %s, which Mailboat sets itself', name));
            elsif jsonb_typeof(value) <> 'string' then
                perform mailboat.invalid_argument('headers.' || name, 'must be a string');
            elsif octet_length(value #>> '{}') > 4096 then
                perform mailboat.invalid_argument('headers.' || name, 'has more than 4096 bytes');
            elsif value #>> '{}' ~ control then
                perform mailboat.invalid_argument('headers.' || name, 'must not contain control characters');
            end if;
            extra := extra + octet_length(name) + octet_length(value #>> '{}');
        end loop;
    end if;

    if cardinality(tags) > 64 then
        perform mailboat.invalid_argument('tags', 'must be 64 at most');
    end if;
    foreach tag in array coalesce(tags, '{}') loop
        if tag is null or tag = '' or length(tag) > 128 or tag ~ control then
            perform mailboat.invalid_argument('tags', 'must each have 1 to 128 characters and no control characters');
        end if;
        extra := extra + octet_length(tag);
    end loop;
    if extra > 65536 then
        perform mailboat.invalid_argument('headers', format('and tags have %s bytes together, the limit is 64 KiB', extra));
    end if;

    if traceparent !~ '^[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}$' or traceparent ~ '^(ff|..-0{32}|.{35}-0{16})' then
        perform mailboat.invalid_argument('traceparent', 'must be a W3C trace context: 00-<32 hex digits>-<16 hex digits>-<2 hex digits>');
    end if;
    return true;
end
$$;

-- Insert one event into any outbox, after all checks.
create function mailboat.insert_checked(
    event_type text, payload bytea, content_type text, aggregate_type text, aggregate_id text, key text, event_id uuid,
    headers jsonb, tags text[], traceparent text, ordered boolean, outbox text
) returns void
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
declare
    target regclass := to_regclass(outbox);
begin
    if target is null then
        perform mailboat.invalid_argument('outbox', format('%s does not exist; make it: select mailboat.create_outbox(%L)', outbox, outbox));
    end if;
    ordered := coalesce(ordered, true);
    if mailboat.check_event(event_type, aggregate_type, aggregate_id, key, content_type, headers, tags, traceparent, ordered)
       and octet_length(payload) > 16777216 then
        perform mailboat.invalid_argument('payload', format('has %s bytes, the limit is 16 MiB: send a reference to it instead', octet_length(payload)));
    end if;
    key := case when ordered then coalesce(key, aggregate_id) end;
    headers := nullif(headers, '{}');
    tags := coalesce(tags, '{}');
    if outbox = 'mailboat.outbox' then  -- a static statement, whose plan is cached
        insert into mailboat.outbox (event_id, event_type, aggregate_type, aggregate_id, key, payload, content_type, headers, tags,
                                     traceparent)
        values (event_id, event_type, aggregate_type, aggregate_id, key, payload, content_type, headers, tags, traceparent);
    else
        execute format('insert into %s (event_id, event_type, aggregate_type, aggregate_id, key, payload, content_type, headers, tags,'
                       ' traceparent) values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)', target)
            using event_id, event_type, aggregate_type, aggregate_id, key, payload, content_type, headers, tags, traceparent;
    end if;
end
$$;

-- Insert one event and return its id. Every mailboat.emit ends here; mailboat.emit_many has its own insert. The id is an argument
-- and not RETURNING, because a writer may not read the outbox.
-- Most events pass the test below. The others go to mailboat.insert_checked, which has all rules. PL/pgSQL prepares every
-- expression again in each transaction, function by function, so the test is one expression with few functions: it accepts no
-- event that mailboat.check_event refuses, but not all that it accepts. Every name is qualified, because a search path costs more.
create function mailboat.emit_bytes(
    event_type text, payload bytea, content_type text, aggregate_type text, aggregate_id text, key text, event_id uuid,
    headers jsonb, tags text[], traceparent text, ordered boolean, outbox text
) returns uuid
    language plpgsql
as $$
begin
    if headers is null and tags is null and traceparent is null and ordered
       and content_type operator(pg_catalog.=) any (array['application/json', 'application/octet-stream'])
       and outbox operator(pg_catalog.=) 'mailboat.outbox' and pg_catalog.to_regclass(outbox) is not null
       and ('' operator(pg_catalog.=) any (array[event_type, aggregate_type, aggregate_id, key])) is not true
       and pg_catalog.octet_length(event_type operator(pg_catalog.||) coalesce(aggregate_type, '')
           operator(pg_catalog.||) coalesce(aggregate_id, '') operator(pg_catalog.||) coalesce(key, '')) operator(pg_catalog.<=) 255
       and (event_type operator(pg_catalog.||) coalesce(aggregate_type, '')) operator(pg_catalog.!~) '[\x01-\x1f\x7f]'
       and coalesce(pg_catalog.octet_length(payload) operator(pg_catalog.<=) 16777216, true) then
        insert into mailboat.outbox (event_id, event_type, aggregate_type, aggregate_id, key, payload, content_type)
        values (event_id, event_type, aggregate_type, aggregate_id, coalesce(key, aggregate_id), payload, content_type);
    else
        perform mailboat.insert_checked(event_type, payload, content_type, aggregate_type, aggregate_id, key, event_id, headers, tags,
                                        traceparent, ordered, outbox);
    end if;
    return event_id;
end
$$;

create function mailboat.emit(
    event_type text, payload jsonb, aggregate_type text default null, aggregate_id text default null, key text default null,
    event_id uuid default null, content_type text default null, headers jsonb default null, tags text[] default null,
    traceparent text default null, ordered boolean default true, outbox text default 'mailboat.outbox'
) returns uuid
    language sql
    return mailboat.emit_bytes(event_type, convert_to(payload::text, 'UTF8'), coalesce(content_type, 'application/json'),
        aggregate_type, aggregate_id, key, coalesce(event_id, gen_random_uuid()), headers, tags, traceparent, ordered, outbox);

-- The type json keeps its text as written, and so does the event.
create function mailboat.emit(
    event_type text, payload json, aggregate_type text default null, aggregate_id text default null, key text default null,
    event_id uuid default null, content_type text default null, headers jsonb default null, tags text[] default null,
    traceparent text default null, ordered boolean default true, outbox text default 'mailboat.outbox'
) returns uuid
    language sql
    return mailboat.emit_bytes(event_type, convert_to(payload::text, 'UTF8'), coalesce(content_type, 'application/json'),
        aggregate_type, aggregate_id, key, coalesce(event_id, gen_random_uuid()), headers, tags, traceparent, ordered, outbox);

create function mailboat.emit(
    event_type text, payload bytea, aggregate_type text default null, aggregate_id text default null, key text default null,
    event_id uuid default null, content_type text default null, headers jsonb default null, tags text[] default null,
    traceparent text default null, ordered boolean default true, outbox text default 'mailboat.outbox'
) returns uuid
    language sql
    return mailboat.emit_bytes(event_type, payload, coalesce(content_type, 'application/octet-stream'),
        aggregate_type, aggregate_id, key, coalesce(event_id, gen_random_uuid()), headers, tags, traceparent, ordered, outbox);

-- Overload for untyped literals and parameters. The payload must be JSON unless content_type names another type.
create function mailboat.emit(
    event_type text, payload text, aggregate_type text default null, aggregate_id text default null, key text default null,
    event_id uuid default null, content_type text default null, headers jsonb default null, tags text[] default null,
    traceparent text default null, ordered boolean default true, outbox text default 'mailboat.outbox'
) returns uuid
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
begin
    content_type := coalesce(content_type, 'application/json');
    if mailboat.is_json(content_type) then
        begin
            perform payload::json;
        exception when data_exception then
            perform mailboat.invalid_argument('payload', 'is not JSON: say content_type => ''text/plain'' for other text');
        end;
    end if;
    return mailboat.emit_bytes(event_type, convert_to(payload, 'UTF8'), content_type,
        aggregate_type, aggregate_id, key, coalesce(event_id, gen_random_uuid()), headers, tags, traceparent, ordered, outbox);
end
$$;

-- Overloads for ids of type uuid, for each type of payload. Their uuid arguments have no default, so a call without such an
-- argument stays unambiguous. An untyped literal or parameter still resolves to the functions above, because Postgres prefers
-- text for it.
do $$
declare
    payload text;
    ids     text;
begin
    foreach payload in array array['jsonb', 'json', 'bytea', 'text'] loop
        -- The order of arguments differs, because functions of one name must differ by the types of their arguments.
        foreach ids in array array[
            'aggregate_id uuid, aggregate_type text default null, key text default null, event_id uuid default null',
            'key uuid, event_id uuid default null, aggregate_type text default null, aggregate_id text default null',
            'aggregate_id uuid, key uuid, aggregate_type text default null, event_id uuid default null'] loop
            execute format($function$
                create function mailboat.emit(
                    event_type text, payload %s, %s, content_type text default null, headers jsonb default null, tags text[] default null,
                    traceparent text default null, ordered boolean default true, outbox text default 'mailboat.outbox'
                ) returns uuid
                    language sql
                    return mailboat.emit(event_type, payload, aggregate_type, aggregate_id::text, key::text, event_id, content_type,
                                         headers, tags, traceparent, ordered, outbox)$function$, payload, ids);
        end loop;
    end loop;
end
$$;

-- A view for writers that can only INSERT, such as an ORM model. A row becomes a call of mailboat.emit, with its checks and its
-- defaults (the key is the aggregate id). The outbox itself has no such conversion: its payload is bytea, whose input syntax
-- changes backslashes.
create view mailboat.new_events as
    select null::uuid as event_id, null::text as event_type, null::text as aggregate_type, null::text as aggregate_id, null::text as key,
           null::jsonb as payload, null::jsonb as headers, null::text[] as tags, null::text as traceparent, null::boolean as ordered,
           null::text as outbox
    where false;

comment on view mailboat.new_events is 'Insert here to emit, if mailboat.emit(...) cannot be called. Always empty.';

create function mailboat.insert_event() returns trigger
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
begin
    new.event_id := mailboat.emit(new.event_type, new.payload, new.aggregate_type, new.aggregate_id, new.key, new.event_id, null,
                                  new.headers, new.tags, new.traceparent, new.ordered, coalesce(new.outbox, 'mailboat.outbox'));
    return new;
end
$$;

create trigger emit instead of insert on mailboat.new_events for each row execute function mailboat.insert_event();

-- Emit many events with one statement and return their ids in the same order. `events` is an array of objects whose fields are
-- named like the arguments of mailboat.emit. The payload is any JSON; with another content_type, a string that is sent as its
-- text. A missing payload, or null, makes the event a tombstone.
create function mailboat.emit_many(events jsonb, outbox text default 'mailboat.outbox') returns setof uuid
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
declare
    target regclass := to_regclass(outbox);
    strange text;
    chosen uuid[];
begin
    if target is null then
        perform mailboat.invalid_argument('outbox', format('%s does not exist; make it: select mailboat.create_outbox(%L)', outbox, outbox));
    elsif jsonb_typeof(events) is distinct from 'array' then
        perform mailboat.invalid_argument('events', 'must be an array of objects');
    elsif exists (select from jsonb_array_elements(events) e where jsonb_typeof(e) <> 'object') then
        perform mailboat.invalid_argument('events', 'must be an array of objects');
    end if;
    select f.field into strange
    from jsonb_array_elements(events) e, jsonb_object_keys(e) f(field)
    where f.field not in ('event_type', 'payload', 'aggregate_type', 'aggregate_id', 'key', 'event_id', 'content_type', 'headers',
                          'tags', 'traceparent', 'ordered')
    limit 1;
    if found then
        perform mailboat.invalid_argument('events', format('have no field %s', to_json(strange)));
    end if;

    -- Choose the ids once, so that the insert and the result have the same ones.
    chosen := array(
        select coalesce((e.event ->> 'event_id')::uuid, gen_random_uuid())
        from jsonb_array_elements(events) with ordinality e(event, ordinal) order by e.ordinal);

    perform mailboat.check_event(r.event_type, r.aggregate_type, r.aggregate_id, r.key, coalesce(r.content_type, 'application/json'),
                                 nullif(r.headers, 'null'), r.tags, r.traceparent, coalesce(r.ordered, true))
    from jsonb_to_recordset(events) r(event_type text, aggregate_type text, aggregate_id text, key text, content_type text,
                                      headers jsonb, tags text[], traceparent text, ordered boolean);
    perform case
        when not mailboat.is_json(coalesce(r.content_type, 'application/json')) and jsonb_typeof(r.payload) not in ('string', 'null')
            then mailboat.invalid_argument('payload', format('must be a string with content_type %s', r.content_type))
        when octet_length(r.payload::text) > 16777216
            then mailboat.invalid_argument('payload', format('has %s bytes, the limit is 16 MiB: send a reference to it instead', octet_length(r.payload::text)))
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
