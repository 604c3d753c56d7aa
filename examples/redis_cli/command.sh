#!/usr/bin/env bash
# Send a command with redis-cli alone, and tell what every worker answers.
#
#   ./command.sh prefetch -6ed9a448787a198f 3f5c45ecbab5e9fd
#   ./command.sh evict 3f5c45ecbab5e9fd
source "$(dirname "$0")/lib.sh"
kind=$1
shift
hashes=$(printf '"%s",' "$@")
cursor=$(end_of results) # first of all: no answer can be missed
waiting=" $(workers | tr '\n' ' ')"
id=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
# Should the reply be lost: the same line once more, id and all. It is carried out once.
redis XADD "${prefix}commands" MAXLEN '~' 100000 '*' type "$kind" id "$id" \
    json "{\"chunk_hashes\":[${hashes%,}],\"lookup_id\":\"example\",\"ttl_ms\":30000,\"issuer\":\"redis-cli\"}" >/dev/null
failed=0
deadline=$((SECONDS + 35))
while [ -n "${waiting// /}" ] && [ "$SECONDS" -lt "$deadline" ]; do
    while IFS=$'\t' read -r what entry command worker status requested loaded resident evicted missing; do
        [ -n "$what" ] || continue
        cursor=$entry
        [ "$what" = result ] && [ "$command" = "$id" ] || continue
        echo "$worker $status requested=$requested loaded=$loaded resident=$resident evicted=$evicted missing=$missing"
        # `deferred` is not final: chunks are in use, and a final result follows
        [ "$status" = deferred ] || waiting=${waiting/ $worker / }
        case $status in failed | rejected | expired) failed=1 ;; esac
    done <<<"$(read_stream results "$cursor")"
done
for worker in $waiting; do
    echo "$worker no-answer"
    failed=1
done
exit $failed
