-- What an event's sequence is a number of: it keeps its series when another number of partitions starts new ones. Null: parked
-- before this was kept, and then the best that can be said is the series of its partition today.
alter table mailboat.parked add series_partition integer, add series_generation integer;
alter table mailboat.dead_letters add series_partition integer, add series_generation integer;
