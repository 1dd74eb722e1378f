# Starts Postgres on /data/main, a new cluster if there is none yet.
set -eu
data=/data/main
if [ ! -d "$data" ]; then
  rm -rf "$data.new"
  initdb --pgdata "$data.new" --username postgres --auth scram-sha-256 --encoding UTF8 --no-locale --no-sync \
    --pwfile <(printf '%s' "${POSTGRES_PASSWORD:?the password of the superuser}") >/dev/null
  printf 'host all all all scram-sha-256\n' >>"$data.new/pg_hba.conf"
  mv "$data.new" "$data" # complete, or not there
fi
# Who waits for whose lock is logged, into a file as well: what a container that was killed has said is soon gone.
exec postgres -D "$data" -c listen_addresses='*' -c unix_socket_directories=/tmp -c max_connections=200 \
  -c log_connections=on -c log_lock_waits=on -c log_line_prefix='%m [%p] ' "$@" 2> >(tee -a /data/postgres.log >&2)
