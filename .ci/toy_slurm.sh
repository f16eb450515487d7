#!/usr/bin/env bash
# A toy Slurm cluster on this one machine, to try launcher=slurm without a cluster:
#   .ci/toy_slurm.sh up | down | status | install
#
# A controller, an accounting database and three node daemons, all with their own
# configuration, keys and state in one folder (TOY_SLURM, /tmp/attnbench-slurm unless set),
# so that a Slurm, MUNGE or MariaDB of the system's own is left alone. Without a container or
# root's privileges over jobs it isolates nothing: good for trying and testing, for nothing else.
set -euo pipefail

folder=${TOY_SLURM:-/tmp/attnbench-slurm}
conf=$folder/slurm.conf
nodes=${TOY_SLURM_NODES:-3}
port=${TOY_SLURM_PORT:-16810}
user=$(id -un)
host=$(hostname -s)
PATH=$PATH:/usr/sbin:/sbin

install() {
    local as_root=()
    [ "$(id -u)" = 0 ] || as_root=(sudo)
    "${as_root[@]}" apt-get update -qq
    # Services of the packages' own are not started: this script runs daemons of its own.
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 \
        apt-get install -y -qq --no-install-recommends slurm-wlm slurmdbd munge mariadb-server \
        >/dev/null
}

require_programs() {
    local program
    for program in slurmctld slurmd slurmdbd munged mariadbd; do
        command -v "$program" >/dev/null || {
            echo "toy_slurm: no $program; on Debian or Ubuntu: .ci/toy_slurm.sh install" >&2
            exit 2
        }
    done
}

pid_of() { cat "$folder/run/$1.pid" 2>/dev/null || true; }

# The name as well: after a crash the number in a file may be another program's.
is_up() {
    local pid
    pid=$(pid_of "$1")
    [ -n "$pid" ] && [ "$(cat "/proc/$pid/comm" 2>/dev/null)" = "${1%%-*}" ]
}

wait_for() { # WHAT COMMAND...: until the command succeeds, at most a minute
    local what=$1
    shift
    for _ in $(seq 300); do
        if "$@" >/dev/null 2>&1; then return 0; fi
        sleep 0.2
    done
    echo "toy_slurm: $what did not come up in a minute; logs are in $folder/log" >&2
    exit 1
}

write_configuration() {
    local cores=$(($(nproc) > 4 ? $(nproc) : 4)) index
    cat >"$conf" <<END
ClusterName=toy
SlurmctldHost=$host(127.0.0.1)
SlurmUser=$user
SlurmdUser=$user
AuthType=auth/munge
# A requeued job waits until the credentials of its last run have expired: 120 s unless set.
AuthInfo=socket=$folder/run/munge.socket,cred_expire=5
CryptoType=crypto/munge
CredType=cred/munge
SlurmctldPort=$port
StateSaveLocation=$folder/state
SlurmctldPidFile=$folder/run/slurmctld.pid
SlurmctldLogFile=$folder/log/slurmctld.log
SlurmdPidFile=$folder/run/slurmd-%n.pid
SlurmdSpoolDir=$folder/spool/%n
SlurmdLogFile=$folder/log/slurmd-%n.log
# Nothing that needs control groups, which a container may not have.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
# Nodes claim more cores than the machine may have, for jobs of several tasks.
SlurmdParameters=config_overrides
JobRequeue=1
MaxArraySize=1001
# Short, so that what takes minutes on a cluster takes seconds here.
SlurmdTimeout=10
SlurmctldTimeout=10
InactiveLimit=0
KillWait=3
MinJobAge=300
SchedulerParameters=sched_interval=2,bf_interval=2,sched_min_interval=100000
UnkillableStepTimeout=20
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort=$((port + 1))
AccountingStoreFlags=job_comment
AccountingStoragePass=$folder/run/munge.socket
END
    for index in $(seq "$nodes"); do
        echo "NodeName=toy$index NodeHostname=$host NodeAddr=127.0.0.1 Port=$((port + 10 + index)) CPUs=$cores" \
            "RealMemory=1000 State=UNKNOWN" >>"$conf"
    done
    echo "PartitionName=debug Nodes=toy[1-$nodes] Default=YES MaxTime=INFINITE State=UP" >>"$conf"
    cat >"$folder/slurmdbd.conf" <<END
AuthType=auth/munge
AuthInfo=socket=$folder/run/munge.socket
DbdHost=$host
DbdAddr=127.0.0.1
DbdPort=$((port + 1))
SlurmUser=$user
PidFile=$folder/run/slurmdbd.pid
LogFile=$folder/log/slurmdbd.log
StorageType=accounting_storage/mysql
StorageHost=localhost
StoragePort=$((port + 2))
StorageUser=slurm
StoragePass=toy
StorageLoc=slurm_acct_db
END
    chmod 600 "$folder/slurmdbd.conf"
}

start_munge() {
    is_up munged && return
    [ -s "$folder/munge.key" ] || (umask 077 && head -c 1024 /dev/urandom >"$folder/munge.key")
    chmod 600 "$folder/munge.key"
    munged --force --key-file="$folder/munge.key" --socket="$folder/run/munge.socket" \
        --pid-file="$folder/run/munged.pid" --log-file="$folder/log/munged.log" \
        --seed-file="$folder/state/munge.seed" 2>>"$folder/log/munged.err"
    wait_for munged test -S "$folder/run/munge.socket"
}

sql() { mariadb --no-defaults --socket="$folder/run/mariadb.socket" --user="$user" "$@"; }

start_database() {
    is_up mariadbd && return
    local options=(--no-defaults "--datadir=$folder/mariadb" "--user=$user")
    [ -d "$folder/mariadb/mysql" ] || mariadb-install-db "${options[@]}" \
        --auth-root-authentication-method=socket "--auth-root-socket-user=$user" \
        --skip-test-db >"$folder/log/mariadb-install.log" 2>&1
    setsid mariadbd "${options[@]}" --socket="$folder/run/mariadb.socket" \
        --pid-file="$folder/run/mariadbd.pid" --bind-address=127.0.0.1 --port=$((port + 2)) \
        --innodb-buffer-pool-size=64M >"$folder/log/mariadb.log" 2>&1 </dev/null &
    wait_for mariadbd sql -e "select 1"
    sql -e "create database if not exists slurm_acct_db;
            create user if not exists 'slurm'@'localhost' identified by 'toy';
            create user if not exists 'slurm'@'127.0.0.1' identified by 'toy';
            grant all on slurm_acct_db.* to 'slurm'@'localhost';
            grant all on slurm_acct_db.* to 'slurm'@'127.0.0.1';"
}

start_slurm() {
    local index
    export SLURM_CONF=$conf
    if ! is_up slurmdbd; then
        # Its own socket: libmariadb takes it from here and not from the port above.
        MYSQL_UNIX_PORT=$folder/run/mariadb.socket slurmdbd
        wait_for slurmdbd sacctmgr -n show cluster
    fi
    sacctmgr -n show cluster format=cluster | grep -qw toy \
        || sacctmgr -i add cluster toy >/dev/null
    sacctmgr -n show account format=account | grep -qw toy \
        || sacctmgr -i add account toy Cluster=toy >/dev/null
    sacctmgr -n show user format=user | grep -qw "$user" \
        || sacctmgr -i add user "$user" Account=toy AdminLevel=Admin >/dev/null
    is_up slurmctld || slurmctld
    wait_for slurmctld scontrol ping
    for index in $(seq "$nodes"); do
        is_up "slurmd-toy$index" || slurmd -N "toy$index"
    done
    wait_for "a node" all_idle
}

all_idle() {
    [ "$(sinfo -h -N -o '%N %T' | grep -c -E 'idle|mixed|allocated')" = "$nodes" ]
}

up() {
    require_programs
    mkdir -p "$folder"/{run,log,state,spool,mariadb}
    chmod 755 "$folder" "$folder"/{run,state,log}
    write_configuration
    start_munge
    start_database
    start_slurm
    echo "toy_slurm: $nodes nodes are up; to use them: export SLURM_CONF=$conf"
}

down() {
    local name pid
    export SLURM_CONF=$conf
    if is_up slurmctld; then
        scancel --me >/dev/null 2>&1 || true
        # Steps of jobs that are still running outlive their daemon.
        for _ in $(seq 20); do
            [ -z "$(squeue -h 2>/dev/null)" ] && break
            sleep 0.5
        done
    fi
    for name in $(seq -f slurmd-toy%g "$nodes") slurmctld slurmdbd mariadbd munged; do
        is_up "$name" || continue
        pid=$(pid_of "$name")
        kill "$pid" 2>/dev/null || continue
        for _ in $(seq 50); do
            kill -0 "$pid" 2>/dev/null || break
            sleep 0.2
        done
        kill -9 "$pid" 2>/dev/null || true
    done
    rm -rf "$folder"
    echo "toy_slurm: down"
}

status() {
    local name
    for name in munged mariadbd slurmdbd slurmctld $(seq -f slurmd-toy%g "$nodes"); do
        echo "$name: $(is_up "$name" && echo up || echo down)"
    done
}

case ${1:-} in
    up | down | status | install) "$1" ;;
    *)
        echo "usage: .ci/toy_slurm.sh up | down | status | install" >&2
        exit 2
        ;;
esac
