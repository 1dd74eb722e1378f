-- Statements of a new connection.

-- name: server
-- Identity and properties of the server. The timeline is null on a standby.
select pg_backend_pid(),
       current_setting('server_version_num')::int,
       current_setting('max_prepared_transactions')::int,
       (select system_identifier from pg_control_system()),
       case when not pg_is_in_recovery() then left(pg_walfile_name(pg_current_wal_insert_lsn()), 8) end
