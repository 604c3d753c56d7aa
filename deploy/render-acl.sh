#!/bin/sh
# Writes the ACL file of a namespace to stdout: render-acl.sh [users.acl.in]
# Takes NAMESPACE (default: default), and ADMIN_, PUBLISHER_, WORKER_, ENGINE_, MEMORY_, FACADE_, OBSERVER_PASSWORD.
set -eu

template="${1:-$(dirname "$0")/users.acl.in}"
namespace="${NAMESPACE:-default}"

plain() { # name, value: only what needs no quoting in an ACL file, a URL or sed
    case "$2" in
        "") echo "$1 is not set" >&2; exit 2 ;;
        *[!A-Za-z0-9._-]*) echo "$1 may hold letters, digits, '.', '_' and '-' only" >&2; exit 2 ;;
    esac
}

plain NAMESPACE "$namespace"
script="s/@NAMESPACE@/$namespace/g"
for role in ADMIN PUBLISHER WORKER ENGINE MEMORY FACADE OBSERVER; do
    eval "value=\${${role}_PASSWORD:-}"
    plain "${role}_PASSWORD" "$value"
    script="$script;s/@${role}_PASSWORD@/$value/g"
done

sed -e '/^#/d' -e "$script" "$template" | awk '{
    joined = joined $0
    if (sub(/\\$/, "", joined)) next
    gsub(/  +/, " ", joined); gsub(/\( /, "(", joined)
    if (joined != "") print joined
    joined = ""
}'
