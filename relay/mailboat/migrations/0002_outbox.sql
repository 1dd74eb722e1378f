-- The outbox itself: how one is made, kept supplied with partitions, and written to.

-- Our own hash: built-in ones may change between versions of Postgres, and with them every partition of every key.
-- sha256 rather than md5, which servers in FIPS mode refuse. 31 bits, so that it is a non-negative integer anywhere.
create function mailboat.key_slot(key text, id bigint) returns integer
    language sql immutable parallel safe
    return case
        when key is null then (id % 2147483647)::integer
        else (get_byte(sha256(convert_to(key, 'UTF8')), 0) & 127) << 24
           | get_byte(sha256(convert_to(key, 'UTF8')), 1) << 16
           | get_byte(sha256(convert_to(key, 'UTF8')), 2) << 8
           | get_byte(sha256(convert_to(key, 'UTF8')), 3)
    end;
