# Read by check.sh: makes, in podman's storage below `folder`, the images from which a Containerfile begins, so that podman builds it as it stands and asks
# no registry of images. debian:NAME-slim is what debootstrap makes, less what that image leaves out; rust:VERSION-slim-NAME is that with a C
# compiler, as Debian has it, and this machine's Rust, which has to be of that version.

# Every name in the FROM lines, but for those of stages.
bases_of() {
    awk 'toupper($1) == "FROM" { if (!($2 in stages)) print $2; if (toupper($3) == "AS") stages[$4] }' "$1" | sort -u
}
# base NAME: makes that image, unless it is there.
base() {
    local name=${1#docker.io/library/}
    if podman image exists "$1"; then return; fi
    case $1 in
        docker.io/library/debian:*-slim) debian "$1" "${name#debian:}" ;;
        docker.io/library/rust:*-slim-*) rust "$1" "${name#rust:}" ;;
        *) echo "nothing here stands for the image $1" >&2; return 1 ;;
    esac
}
debian() {
    local root=$folder/root
    rm -rf --one-file-system "$root"
    debootstrap --variant=minbase "${2%-slim}" "$root" "$mirror" > "$folder/debootstrap.log" || { cat "$folder/debootstrap.log" >&2; return 1; }
    rm -rf "$root"/var/cache/apt/* "$root"/var/lib/apt/lists/* "$root"/var/log/* "$root"/usr/share/{doc,man,locale,info}/*
    imported "$root" "$1"
}
rust() {
    local version=${2%%-*} root toolchain
    toolchain=$(rustc --print sysroot)
    case $("$toolchain/bin/rustc" --version) in
        "rustc $version."*) ;;
        *) echo "$1 needs Rust $version, and this machine's is $("$toolchain/bin/rustc" --version)" >&2; return 1 ;;
    esac
    base "docker.io/library/debian:${2##*-}-slim"
    local from
    from=$(buildah from --pull=never "docker.io/library/debian:${2##*-}-slim")
    root=$(buildah mount "$from")
    like_the_host "$root"
    within "$root" apt-get update -q > "$folder/apt.log"
    within "$root" apt-get install -q -y --no-install-recommends ca-certificates gcc libc6-dev >> "$folder/apt.log" 2>&1 ||
        { cat "$folder/apt.log" >&2; return 1; }
    like_the_host "$root"
    mkdir -p "$root/usr/local/cargo"
    (cd "$toolchain" && tar -c --exclude=lib/rustlib/src bin lib) | tar -x -C "$root/usr/local"
    chroot "$root" ldconfig
    buildah umount "$from" > /dev/null
    buildah config --env CARGO_HOME=/usr/local/cargo --env SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt "$from"
    buildah commit -q --rm "$from" "$1" > /dev/null
}
imported() {
    local from
    from=$(buildah from scratch)
    cp -a "$1/." "$(buildah mount "$from")"
    buildah umount "$from" > /dev/null
    buildah config --cmd bash "$from"
    buildah commit -q --rm "$from" "$2" > /dev/null
    rm -rf --one-file-system "$1"
}
# What stands for the sources of an image: those that go into it.
sources_of() {
    git ls-files -z --cached --others --exclude-standard -- Cargo.toml Cargo.lock Containerfile .dockerignore crates examples data |
        xargs -0 sha256sum 2> /dev/null | sha256sum | cut -c 1-16
}
label_of() { podman image inspect --format '{{index .Labels "sources"}}' "localhost/$1" 2> /dev/null || true; }
