#!/bin/sh
# Makes the secrets of the containers, once: the service's certificate, tokens, Grafana's password.
# Existing files are left alone. To replace a secret, remove its file; if it is a token, revoke the old one, too.
set -eu
umask 077
config=${CONFIG:-/etc/headrace/service.toml}
run=${RUN:-/run/headrace}

# made FILE MODE COMMAND...: write the output of COMMAND to FILE; FILE is complete or absent.
made() {
    file=$1 mode=$2
    shift 2
    [ -s "$file" ] && return
    "$@" > "$file.part"
    chmod "$mode" "$file.part"
    mv "$file.part" "$file"
}

# copied FILE FOLDER MODE
copied() { made "$2/$(basename "$1")" "$3" cat "$1"; }

# 1. A self-signed certificate: clients that have server.pem verify the service with it.
if ! [ -s "$run/tls/server.pem" ]; then
    openssl req -x509 -newkey rsa:3072 -nodes -sha256 -days 825 -subj /CN=headrace \
        -addext subjectAltName=DNS:headrace,DNS:localhost,IP:127.0.0.1 \
        -addext keyUsage=critical,digitalSignature,keyCertSign -addext extendedKeyUsage=serverAuth \
        -keyout "$run/tls/server.key" -out "$run/tls/server.pem.part" 2> /dev/null
    mv "$run/tls/server.pem.part" "$run/tls/server.pem"
fi

# 2. Tokens and passwords. Prometheus runs as another user, so its files have mode 444; no other service has that volume.
made "$run/following/feed.token" 400 headrace token create replica --role operator --config "$config"
made "$run/following/replica.token" 400 openssl rand -hex 24
made "$run/scraping/headrace.token" 444 headrace token create prometheus --role viewer --config "$config"
made "$run/watching/password" 444 openssl rand -hex 12

# 3. Each container gets copies of what it needs, and nothing else.
copied "$run/tls/server.pem" "$run/following" 400
copied "$run/tls/server.pem" "$run/scraping" 444
copied "$run/following/replica.token" "$run/scraping" 444
echo "certificate, tokens and password are ready"
