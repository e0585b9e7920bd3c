#!/bin/bash
# Becomes systemd as PID 1 of a machine: boot.sh ROOT SCRATCH HOSTNAME [FOLDER...]
# Started by unshare with new pid, mount, uts, ipc, cgroup and perhaps net namespaces. ROOT is only
# read; what the machine writes goes to a tmpfs mounted at SCRATCH, seen in here alone. Each FOLDER
# of the host is there at the same path.
set -euo pipefail
root=$1 scratch=$2 name=$3
shift 3

mount --make-rprivate /
mount -t tmpfs tmpfs "$scratch"
mkdir "$scratch"/{upper,work,machine}
mount -t overlay overlay -o "lowerdir=$root,upperdir=$scratch/upper,workdir=$scratch/work" "$scratch/machine"
cd "$scratch/machine"

mount -t proc proc proc
mount -t sysfs -o ro sysfs sys
mount -t cgroup2 cgroup2 sys/fs/cgroup
mount -t tmpfs -o mode=755 tmpfs run
mount -t tmpfs tmpfs tmp

mount -t tmpfs -o mode=755 tmpfs dev
mkdir dev/pts dev/shm
for node in null:3 zero:5 full:7 random:8 urandom:9; do
    mknod -m 666 "dev/${node%:*}" c 1 "${node#*:}"
done
mknod -m 666 dev/tty c 5 0
mount -t devpts -o newinstance,ptmxmode=666 devpts dev/pts
ln -s pts/ptmx dev/ptmx
ln -s /proc/self/fd dev/fd
touch dev/console

for folder; do
    mkdir -p ".$folder"
    mount --bind "$folder" ".$folder"
done

hostname "$name"
echo "$name" >etc/hostname
exec env -i container=lxc PATH=/usr/sbin:/usr/bin:/sbin:/bin \
    chroot . /sbin/init --log-target=journal --show-status=no
