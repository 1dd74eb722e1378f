-- Configurations that relays follow while they run. They reach relays one by one, a little late or out of order, so the
-- database remembers how new the word about a subscription is, and whose it was: an older word changes nothing.

alter table mailboat.subscriptions
    add column config_version bigint not null default 0,   -- of the newest configuration that named it; 0: has none
    add column declared_by    text not null default '',    -- uid of the OutboxRelay whose subscription it is
    add column retired_at     timestamptz;                 -- its resource was deleted: only dead letters are left of it
