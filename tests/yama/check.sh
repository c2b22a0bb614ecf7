#!/usr/bin/env bash
# Who may copy out of a rank's memory under Yama (`kernel.yama.ptrace_scope`): Debian's kernel, in qemu without KVM, runs guest.sh with the programs of
# this clone. docs/platforms.md says what is expected.
#
#     apt install qemu-system-x86 cpio strace iproute2 util-linux binutils
#     tests/yama/check.sh
#
# It takes the kernel out of Debian's package, without installing that: KERNEL=FILE names another one, such as /boot/vmlinuz-6.8.0-60-generic. With BIN=FOLDER
# the programs are those in FOLDER, and nothing is built. It needs x86-64, and the network for the package. All is in target/yama.
set -euo pipefail
cd "$(dirname "$0")/../.."
export PATH=$PATH:/usr/sbin:/sbin
for tool in qemu-system-x86_64 cpio ip mount setpriv setsid strace strip unshare; do
    command -v $tool > /dev/null || { echo "this needs $tool: apt install qemu-system-x86 cpio strace iproute2 util-linux binutils" >&2; exit 1; }
done
target=$(realpath -m "${CARGO_TARGET_DIR:-target}")
folder=$target/yama
mkdir -p "$folder"
if [ -z "${BIN:-}" ]; then
    cargo build -p phalanx-cli -p phalanx-bench --locked
    BIN=$target/debug
fi
if [ -z "${KERNEL:-}" ]; then
    package=$(apt-cache depends linux-image-amd64 | awk '/Depends: linux-image-/ { print $2; exit }')
    if [ ! -e "$folder/$package" ]; then
        rm -rf "$folder/package" "$folder"/*.deb
        (cd "$folder" && apt-get download -q "$package")
        dpkg-deb -x "$folder/${package}"_*.deb "$folder/package"
        mv "$folder/package" "$folder/$package"
        rm "$folder"/*.deb
    fi
    KERNEL=$(echo "$folder/$package"/boot/vmlinuz-*)
fi

# A disk in memory, with these programs and the libraries that they load.
root=$folder/root
rm -rf "$root"
mkdir -p "$root"/{bin,dev,proc,sys,tmp}
chmod 1777 "$root/tmp"
programs=()
for program in bash cat grep ip mount seq setpriv setsid sleep strace unshare; do programs+=("$(type -P $program)"); done
cp -L "${programs[@]}" "$root/bin"
strip -o "$root/bin/phalanx" "$BIN/phalanx"
strip -o "$root/bin/phalanx-bench" "$BIN/phalanx-bench"
ldd "$root"/bin/* | grep -oE '/[^ ]+ \(0x' | sort -u | while read -r library _; do
    mkdir -p "$root${library%/*}"
    cp -L "$library" "$root$library"
done
cp tests/yama/guest.sh "$root/init"
(cd "$root" && find . -print0 | cpio -o0 -H newc --quiet) > "$folder/initrd"

# qemu's own processor is AMD's, on which no rank copies.
said=$folder/said
timeout 600 qemu-system-x86_64 -accel tcg -cpu max,vendor=GenuineIntel -smp 2 -m 2048 -nographic -no-reboot -net none \
    -kernel "$KERNEL" -initrd "$folder/initrd" -append "console=ttyS0 quiet panic=-1" < /dev/null | tee "$said"
grep -q '^all as expected' "$said" || { echo "FAILED: it is not as expected under Yama" >&2; exit 1; }
