-- The attempt journal.
--
-- A crash of a consumer rolls its transaction back, so an attempt is recorded where a rollback has no effect: in a sequence. Each
-- cursor has two, for its window and for its parked events. The value consists of a hash of the state in which the attempt began,
-- the number of attempts that began in that state, and the time of the last one. Only the transaction that holds the cursor's
-- lock writes them.
-- If an attempt began less than a second ago, and was neither committed nor refused, its events are not returned yet:
-- a consumer whose handler failed has rolled back, and calls mailboat.refuse next.

create function mailboat.journal_name(subscription bigint, of_partition integer, kind text) returns text
    language sql immutable
    return format('mailboat.journal_%s_%s_%s', subscription, of_partition, kind);

-- Create the missing journals of a pull subscription, after its declaration or a change of its partitions.
create function mailboat.make_journals(subscription bigint) returns void
    language plpgsql security definer
    set search_path = pg_catalog, pg_temp
    set client_min_messages = warning
as $$
declare
    name text;
begin
    for name in
        select mailboat.journal_name(s.id, n, kind)
        from mailboat.subscriptions s join mailboat.pull_policies p on p.subscription_id = s.id,
             generate_series(0, s.partitions - 1) n, unnest(array['window', 'parked']) kind
        where s.id = subscription
    loop
        if to_regclass(name) is null then
            execute format('create sequence if not exists %s minvalue 0 cache 1', name);
        end if;
    end loop;
end
$$;

create function mailboat.drop_journals() returns trigger
    language plpgsql security definer
    set search_path = pg_catalog, pg_temp
    set client_min_messages = warning
as $$
declare
    name name;
begin
    for name in
        select c.relname from pg_class c
        where c.relnamespace = 'mailboat'::regnamespace and c.relkind = 'S'
          and c.relname ~ format('^journal_%s_\d+_(window|parked)$', old.subscription_id)
    loop
        execute format('drop sequence if exists mailboat.%I', name);
    end loop;
    foreach name in array array['probe', 'tail', 'walk'] loop
        execute format('drop function if exists mailboat.%I', name || '_' || old.subscription_id);
    end loop;
    return null;
end
$$;

create trigger drop_journals after delete on mailboat.pull_policies for each row execute function mailboat.drop_journals();

-- Read a journal: 26 bits of a hash of the state, 10 bits of a count, 27 bits of tenths of a second. `begun` has the count for
-- each of `states`. `lately`: the last attempt began less than a second ago.
create function mailboat.journal_entry(journal text, states text[], out begun integer[], out lately boolean)
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
declare
    noted bigint;
begin
    begun := array_fill(0, array[cardinality(states)]);
    lately := false;
    if to_regclass(journal) is not null then
        execute 'select last_value from ' || journal into noted;
        for i in 1 .. cardinality(states) loop
            if (noted >> 37) = (hashtextextended(states[i], 0) & 67108863) then
                begun[i] := (noted >> 27) & 1023;
                lately := ((mailboat.clock_tenths() - (noted & 134217727)) & 134217727) < 10;
            end if;
        end loop;
    end if;
end
$$;

create function mailboat.clock_tenths() returns bigint
    language sql volatile
    set search_path = pg_catalog, pg_temp
    return (extract(epoch from clock_timestamp()) * 10)::bigint & 134217727;

-- Record that one more attempt begins in this state. A rollback does not undo this.
create function mailboat.record_attempt(journal text, state text, earlier integer) returns void
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
begin
    if to_regclass(journal) is not null then
        perform setval(journal, ((hashtextextended(state, 0) & 67108863) << 37) | (least(earlier + 1, 1023)::bigint << 27)
                                | mailboat.clock_tenths());
    end if;
end
$$;
