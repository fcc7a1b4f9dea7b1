# Read by the other scripts here, not run: settings, locking, and how a node is started and found.
# shellcheck shell=bash disable=SC2034
#
# DEVCLUSTER_DIR    where everything of the cluster lives     (default: a folder per user in $TMPDIR or /tmp)
# DEVCLUSTER_NODES  how many nodes                            (3)
# DEVCLUSTER_CPUS   processors each node claims to have       (4)
# DEVCLUSTER_NET    first three numbers of the nodes' network (10.231.7; seen by nobody outside the cluster)
# DEVCLUSTER_PORT   multi mode: first of the 1 + 1 + nodes ports on 127.0.0.1  (6817)
# DEVCLUSTER_AUTH   munge | none                              (munge)
# DEVCLUSTER_SACCT  1 = with slurmdbd and a database          (0)
# DEVCLUSTER_CONF   lines to append to slurm.conf             (none)
# Clusters side by side need a folder each, and in multi mode ports of their own.

PATH=$PATH:/usr/sbin:/sbin
lab=${DEVCLUSTER_DIR:-${TMPDIR:-/tmp}/devcluster-$(id -u)}
nodes=${DEVCLUSTER_NODES:-3}
cpus=${DEVCLUSTER_CPUS:-4}
net=${DEVCLUSTER_NET:-10.231.7}
port=${DEVCLUSTER_PORT:-6817}
auth=${DEVCLUSTER_AUTH:-munge}
sacct=${DEVCLUSTER_SACCT:-0}
extra=${DEVCLUSTER_CONF:-}

die() { echo "devcluster: $*" >&2; exit 2; }

case $lab in /*) ;; *) lab=$PWD/$lab ;; esac
case $lab in *[[:space:]\'\"\\:]*) die "DEVCLUSTER_DIR must not hold spaces, quotes, backslashes or colons, is: $lab" ;; esac
[[ $nodes =~ ^[1-9][0-9]?$ ]] || die "DEVCLUSTER_NODES must be 1 to 99, is: $nodes"
[[ $cpus =~ ^[1-9][0-9]*$ ]] || die "DEVCLUSTER_CPUS must be a positive number, is: $cpus"
[[ $port =~ ^[1-9][0-9]{3,4}$ ]] || die "DEVCLUSTER_PORT must be 1000 to 99999, is: $port"
[[ $net =~ ^[0-9]+\.[0-9]+\.[0-9]+$ ]] || die "DEVCLUSTER_NET must be three numbers, like 10.231.7, is: $net"
[[ $auth =~ ^(munge|none)$ ]] || die "DEVCLUSTER_AUTH must be munge or none, is: $auth"
[[ $sacct =~ ^[01]$ ]] || die "DEVCLUSTER_SACCT must be 0 or 1, is: $sacct"

# The shell that calls us may sit inside a job of another cluster.
unset "${!SLURM_@}" "${!SBATCH_@}" "${!SRUN_@}" 2>/dev/null || true
export SLURM_CONF=$lab/etc/slurm.conf

# One at a time, up and down alike.  The lock lies beside the folder, since `down` removes the folder.
take_lock() {
  mkdir -p "$(dirname "$lab")"
  until [ "$lab.lock" -ef /proc/self/fd/9 ]; do # `down` may have removed the file that we waited for
    exec 9>"$lab.lock"
    flock -w "${DEVCLUSTER_WAIT:-120}" 9 || die "another up or down of $lab has been at work for ${DEVCLUSTER_WAIT:-120} s"
  done
}

# A cluster that somebody has made here, and that belongs to us.
is_cluster() { [ -e "$lab/.devcluster" ] && [ -O "$lab/.devcluster" ]; }
mode_of() { cut -d' ' -f1 "$lab/settings" 2>/dev/null; }

# Run a client where the controller can be reached.
client() { if [ -x "$lab/head" ]; then "$lab/head" timeout 5 "$@"; else timeout 5 "$@"; fi; }

# How many nodes are fit for work.
fit() { client sinfo -h -N -o '%N %T' 2>/dev/null | sort -u | grep -cE ' (idle|mixed|allocated|completing)$' || true; }

# daemon NAME COMMAND...: start in the background, free of our terminal and lock; remember its process id.
daemon() {
  local name=$1
  shift
  setsid "$@" </dev/null >"$lab/log/$name.out" 2>&1 9>&- &
  echo $! >"$lab/run/$name.pid"
}

# wait_until SECONDS COMMAND...
wait_until() {
  local tries=$(($1 * 20))
  shift
  while ! "$@"; do
    tries=$((tries - 1))
    [ $tries -gt 0 ] || return 1
    sleep 0.05
  done
}

namespace_of() { readlink "/proc/$1/ns/net" 2>/dev/null; }
has_own_network() { # PROCESS: has it left both our network and the head's?
  local its
  its=$(namespace_of "$1")
  [ -n "$its" ] && [ "$its" != "$(namespace_of self)" ] && [ "$its" != "$(namespace_of "$(cat "$lab/run/head.pid")")" ]
}

# start_node I: slurmd of node I.  In netns mode inside namespaces of its own: the first process in them has the
# process id in run/slurmd-nodeI.pid, and whoever kills it with -9 makes the whole node vanish.
start_node() {
  local i=$1 head pid
  mkdir -p "$lab"/{spool,tmp}/node"$i"
  if [ "$mode" = multi ]; then
    daemon "slurmd-node$i" slurmd -D -N "node$i"
    return
  fi
  head=$(cat "$lab/run/head.pid")
  daemon "slurmd-node$i" nsenter -t "$head" --net --uts --mount -- \
    unshare --net --uts --ipc --mount --pid --fork --kill-child --mount-proc sh -c "
      hostname node$i && mount -t tmpfs tmpfs /dev/shm && ip link set lo up || exit 1
      until ip addr show dev eth0 2>/dev/null | grep -q 'inet '; do sleep 0.02; done
      slurmd -D -N node$i; exit \$?"
  pid=$(cat "$lab/run/slurmd-node$i.pid")
  wait_until 5 has_own_network "$pid" || die "node$i did not get its namespaces: $(cat "$lab/log/slurmd-node$i.out")"
  nsenter -t "$head" --net ip link del "to-node$i" 2>/dev/null || true # left by an earlier life of the node
  nsenter -t "$head" --net ip link add "to-node$i" type veth peer name eth0 netns "$pid"
  nsenter -t "$head" --net ip link set "to-node$i" master cluster up
  nsenter -t "$pid" --net sh -c "ip link set eth0 up && ip addr add $net.$i/24 dev eth0"
  namespace_of "$pid" >>"$lab/run/namespaces"
}
