# Started by `systemd.py`: DIRECTORY PYTHON PACKAGES CHECKOUT NAME-OF-PYTHON MASKED-UNITS
set -e
mount --make-rprivate /
mount -t tmpfs tmpfs "$1"
mkdir "$1/upper" "$1/work" "$1/root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$1/upper,workdir=$1/work" "$1/root"
cd "$1/root"
mount -t proc proc proc
mount -t sysfs sysfs sys
mount -t cgroup2 cgroup2 sys/fs/cgroup
mount --rbind /dev dev
for each in run tmp; do mount -t tmpfs tmpfs "$each"; done
mkdir opt/python opt/packages opt/mqks
mount --rbind "$2" opt/python
mount --rbind "$3" opt/packages
mount --rbind "$4" opt/mqks
rm -rf etc/systemd/system/*.wants etc/systemd/system/mqks*
for each in $6; do ln -sf /dev/null "etc/systemd/system/$each.service"; done
printf '[Unit]\nDefaultDependencies=no\n' > etc/systemd/system/still.target
cp opt/mqks/deploy/mqks.s* etc/systemd/system/
cat > usr/local/bin/mqks <<END
#!/bin/sh
export LD_LIBRARY_PATH=/opt/python/lib PYTHONPATH=/opt/mqks:/opt/packages
exec /opt/python/bin/$5 /opt/mqks/cli.py "\$@"
END
chmod 755 usr/local/bin/mqks
# Not by chroot, in which nobody may make user namespaces.
mkdir old
pivot_root . old
umount -l old
rmdir old
# Credentials are mounted by a child, and are seen by way of that.
mount --make-rshared /
exec /lib/systemd/systemd --system --unit=still.target --show-status=no
