#!/usr/bin/env bash
# Tell every finished request once, with redis-cli alone: its id, its session, its chunk hashes.
#
#   ./follow.sh PLACE            go on where the file PLACE says; stop it with Ctrl-C, start it again
#   FROM=start COUNT=3 ./follow.sh PLACE
source "$(dirname "$0")/lib.sh"
place=$1
declare -A next=() # publisher -> "epoch seq", the numbers that come next
if [ -f "$place" ]; then
    source "$place"
elif [ "${FROM:-end}" = start ]; then
    cursor=0-0
else
    cursor=$(end_of events)
fi

# The cursor together with the numbers, after the event was dealt with: nothing is lost, and repeats are known.
save() {
    declare -p cursor next | sed 's/^declare -A/declare -gA/' >"$place.part"
    mv "$place.part" "$place"
}

told=0
while [ "${COUNT:-0}" = 0 ] || [ "$told" -lt "$COUNT" ]; do
    while IFS=$'\t' read -r what entry publisher epoch seq request session hashes; do
        [ -n "$what" ] || continue
        cursor=$entry
        if [ "$what" = finished ]; then
            read -r known_epoch known_seq <<<"${next[$publisher]:-$epoch $seq}"
            if [ "$epoch" -gt "$known_epoch" ] || { [ "$epoch" = "$known_epoch" ] && [ "$seq" -ge "$known_seq" ]; }; then
                missed=$((epoch == known_epoch ? seq - known_seq : seq))
                echo "$request session=$session missed=$missed $hashes"
                next[$publisher]="$epoch $((seq + 1))"
                told=$((told + 1))
            fi # lower: a batch that was sent again
        fi
        save
        [ "${COUNT:-0}" != 0 ] && [ "$told" -ge "$COUNT" ] && break
    done <<<"$(read_stream events "$cursor" || { echo "the bus is away, trying again" >&2; sleep 0.5; })"
done
