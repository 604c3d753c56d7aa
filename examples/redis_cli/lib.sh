# Sourced by the others. KVBUS_REDIS_URL and KVBUS_NAMESPACE say where; KVBUS_REDIS_CLI which redis-cli.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
prefix="kvbus:{${KVBUS_NAMESPACE:-default}}:" # the braces are part of the keys
cli=("${KVBUS_REDIS_CLI:-redis-cli}" -u "${KVBUS_REDIS_URL:-redis://127.0.0.1:6379/0}" --raw)

redis() { "${cli[@]}" "$@"; }

# The id of the newest entry ever. Resolved once: `$` inside a loop would lose what comes between two reads.
end_of() {
    if [ "$(redis EXISTS "$prefix$1")" = 1 ]; then
        redis XINFO STREAM "$prefix$1" | sed -n '/^last-generated-id$/{n;p;}'
    else
        echo 0-0
    fi
}

# Wait for something behind the cursor, then decode it: read_stream STREAM CURSOR
read_stream() {
    redis XREAD BLOCK 2000 COUNT 1 STREAMS "$prefix$1" "$2" >/dev/null
    redis --eval "$here/read.lua" "$prefix$1" , "$2" 32
}

# Registered workers that are alive: each of them owes a result.
workers() {
    local name
    redis HKEYS "${prefix}workers" | while read -r name; do
        [ -n "$name" ] && [ "$(redis EXISTS "${prefix}live:$name")" = 1 ] && echo "$name"
    done || true
}
