# Initialize /data/main if it does not exist, and start Postgres.
set -eu
data=/data/main
if [ ! -d "$data" ]; then
  rm -rf "$data.new"
  initdb --pgdata "$data.new" --username postgres --auth scram-sha-256 --encoding UTF8 --no-locale --no-sync \
    --pwfile <(printf '%s' "${POSTGRES_PASSWORD:?the password of the superuser}") >/dev/null
  printf 'host all all all scram-sha-256\n' >>"$data.new/pg_hba.conf"
  mv "$data.new" "$data" # atomic
fi
# Log lock waits, also into a file: kubelet soon deletes the log of a killed container.
exec postgres -D "$data" -c listen_addresses='*' -c unix_socket_directories=/tmp -c max_connections=200 \
  -c log_connections=on -c log_lock_waits=on -c log_line_prefix='%m [%p] ' "$@" 2> >(tee -a /data/postgres.log >&2)
