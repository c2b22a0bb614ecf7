#!/usr/bin/env bash
# `cargo binstall` of both commands: the real tool makes the address of an archive from a manifest's table, fetches what `.ci/archives` has made
# from a server on this machine, and installs a command that starts.
#
#     tests/binstall/check.sh                    builds cargo-binstall into target/binstall first, which takes minutes
#     tests/binstall/check.sh CARGO_BINSTALL     this one
#
# It needs jq, openssl and python3 with venv; cargo-zigbuild comes from PyPI, into target/binstall. The project has no address yet: a copy of its
# tracked files gets one.
set -euo pipefail
cd "$(dirname "$0")/../.."

# The newest that Rust 1.95 builds.
version=1.20.0
folder=$(realpath -m "${CARGO_TARGET_DIR:-target}")/binstall
mkdir -p "$folder"
tool=${1:-$folder/tool/bin/cargo-binstall}
if [ $# = 0 ] && [ ! -x "$tool" ]; then
    CARGO_PROFILE_DEV_DEBUG=0 CARGO_TARGET_DIR=$folder/build cargo install cargo-binstall --version $version --locked --debug --root "$folder/tool" \
        --no-default-features --features rustls,fancy-no-backtrace,static
fi
[ -x "$folder/zig/bin/cargo-zigbuild" ] || { python3 -m venv "$folder/zig" && "$folder/zig/bin/pip" install -q ziglang cargo-zigbuild; }
PATH=$folder/zig/bin:$PATH .ci/archives

work=$(mktemp -d)
server=
trap '[ -z "$server" ] || kill "$server"; rm -rf "$work"' EXIT
cd "$work"
# The tool speaks HTTPS alone.
openssl req -x509 -newkey rsa:2048 -nodes -keyout ca.key -out ca.pem -days 1 -subj /CN=ca -addext basicConstraints=critical,CA:TRUE 2> openssl.log
openssl req -newkey rsa:2048 -nodes -keyout host.key -out host.req -subj /CN=localhost 2>> openssl.log
printf 'subjectAltName=DNS:localhost\nbasicConstraints=CA:FALSE\n' > host.ext
openssl x509 -req -in host.req -CA ca.pem -CAkey ca.key -CAcreateserial -days 1 -extfile host.ext -out host.pem 2>> openssl.log
cat > server.py << 'END'
import http.server
import ssl

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain("host.pem", "host.key")
server.socket = context.wrap_socket(server.socket, server_side=True)
with open("port.part", "w") as file:
    file.write(str(server.server_address[1]))
__import__("os").rename("port.part", "port")
server.serve_forever()
END
python3 server.py 2> server.log &
server=$!
for _ in {1..100}; do [ -e port ] || sleep 0.1; done
address=https://localhost:$(cat port)/owner/name

git -C "$OLDPWD" ls-files -z --cached --others --exclude-standard | tar -C "$OLDPWD" --null -T - -c | tar -x --one-top-level=copy
(cd copy && git init -q && git add -A && .ci/address https://localhost/owner/name > address.log && sed -i "s,https://localhost/owner/name,$address," Cargo.toml)
of=$(sed -n '/^\[workspace.package\]/,/^\[/s/^version = "\(.*\)"$/\1/p' copy/Cargo.toml)
mkdir -p "owner/name/releases/download"
ln -s "$(dirname "$folder")/archives" "owner/name/releases/download/v$of"
for package in phalanx-cli phalanx-bench; do
    BINSTALL_HTTPS_ROOT_CERTS=$work/ca.pem timeout 120 "$tool" binstall --no-confirm --manifest-path "copy/crates/$package" --root "$work/root" \
        --strategies crate-meta-data --disable-telemetry --no-discover-github-token "$package"
    grep -q "GET /owner/name/releases/download/v$of/$package-$of-.*tar.gz HTTP/1.1\" 200" server.log
done
root/bin/phalanx --version
# It finds the other command beside it.
root/bin/phalanx bench --version
echo "cargo binstall has installed both commands"
