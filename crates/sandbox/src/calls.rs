//! The system calls that are used, and with which arguments.
//!
//! What is missing matters more: no program is run (execve), no process is made (clone without CLONE_THREAD, fork), looked
//! into or signalled (ptrace, process_vm_readv, kill of another, pidfd_open), nothing is mounted, no module, BPF program, key or counter
//! of perf's is loaded or made, no io_uring (whose calls a filter cannot see), no raw or netlink socket, no memory that can
//! be written and executed.

use crate::{Error, ioctls};
use libc::c_long;
use seccompiler::SeccompCmpOp::{Eq, MaskedEq};
use seccompiler::{SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompRule};
use std::collections::BTreeMap;

/// What a filter is made of: a call, and the rules of which one has to hold; without any it always does.
pub(crate) type Rules = BTreeMap<i64, Vec<SeccompRule>>;

/// Calls that may have any arguments.
const PLAIN: &[c_long] = &[
    // Reading, writing, waiting.
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_readv,
    libc::SYS_writev,
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    libc::SYS_preadv,
    libc::SYS_pwritev,
    libc::SYS_preadv2,
    libc::SYS_pwritev2,
    libc::SYS_close,
    libc::SYS_close_range,
    libc::SYS_dup,
    libc::SYS_dup3,
    libc::SYS_pipe2,
    libc::SYS_ppoll,
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    libc::SYS_eventfd2,
    libc::SYS_timerfd_create,
    libc::SYS_timerfd_settime,
    // Files: which of them, Landlock says.
    libc::SYS_openat,
    libc::SYS_lseek,
    libc::SYS_fstat,
    libc::SYS_newfstatat,
    libc::SYS_statx,
    libc::SYS_statfs,
    libc::SYS_fstatfs,
    libc::SYS_ftruncate,
    libc::SYS_fallocate,
    libc::SYS_fadvise64,
    libc::SYS_fsync,
    libc::SYS_fdatasync,
    libc::SYS_flock,
    libc::SYS_faccessat,
    libc::SYS_faccessat2,
    libc::SYS_readlinkat,
    libc::SYS_getdents64,
    libc::SYS_unlinkat,
    libc::SYS_renameat,
    libc::SYS_renameat2,
    libc::SYS_fchmod,
    libc::SYS_fchmodat,
    libc::SYS_umask,
    libc::SYS_getcwd,
    // Memory.
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_mincore,
    libc::SYS_msync,
    libc::SYS_mlock,
    libc::SYS_munlock,
    libc::SYS_membarrier,
    libc::SYS_brk,
    libc::SYS_memfd_create,
    libc::SYS_userfaultfd,
    // Threads, signals, time.
    libc::SYS_futex,
    libc::SYS_futex_waitv,
    libc::SYS_set_robust_list,
    libc::SYS_get_robust_list,
    libc::SYS_rseq,
    libc::SYS_sched_yield,
    libc::SYS_sched_getaffinity,
    libc::SYS_getcpu,
    libc::SYS_gettid,
    libc::SYS_getpid,
    libc::SYS_getppid,
    libc::SYS_getpgid,
    libc::SYS_getuid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getegid,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigpending,
    libc::SYS_rt_sigsuspend,
    libc::SYS_rt_sigtimedwait,
    libc::SYS_rt_sigreturn,
    libc::SYS_sigaltstack,
    libc::SYS_restart_syscall,
    libc::SYS_nanosleep,
    libc::SYS_clock_nanosleep,
    libc::SYS_clock_gettime,
    libc::SYS_clock_getres,
    libc::SYS_gettimeofday,
    libc::SYS_getrandom,
    libc::SYS_uname,
    libc::SYS_sysinfo,
    libc::SYS_getrusage,
    libc::SYS_exit,
    libc::SYS_exit_group,
    // Sockets: of which kind, `socket` says.
    libc::SYS_bind,
    libc::SYS_listen,
    libc::SYS_accept,
    libc::SYS_accept4,
    libc::SYS_connect,
    libc::SYS_getsockname,
    libc::SYS_getpeername,
    libc::SYS_getsockopt,
    libc::SYS_sendto,
    libc::SYS_recvfrom,
    libc::SYS_sendmsg,
    libc::SYS_sendmmsg,
    libc::SYS_recvmsg,
    libc::SYS_recvmmsg,
    libc::SYS_shutdown,
];

/// The same by the names that x86 had before: the C library and tokio use them there.
#[cfg(target_arch = "x86_64")]
const OLDER: &[c_long] = &[
    libc::SYS_open,
    libc::SYS_stat,
    libc::SYS_lstat,
    libc::SYS_access,
    libc::SYS_readlink,
    libc::SYS_unlink,
    libc::SYS_rename,
    libc::SYS_chmod,
    libc::SYS_dup2,
    libc::SYS_pipe,
    libc::SYS_poll,
    libc::SYS_select,
    libc::SYS_pselect6,
    libc::SYS_epoll_create,
    libc::SYS_epoll_wait,
    libc::SYS_eventfd,
    libc::SYS_getrlimit,
    libc::SYS_getpgrp,
    libc::SYS_time,
];
#[cfg(not(target_arch = "x86_64"))]
const OLDER: &[c_long] = &[libc::SYS_pselect6];

/// The first call that an old kernel may lack and the C library can do without (Linux 5.1), and one beyond the last that
/// there may be for a long time.
const NEWER: std::ops::Range<c_long> = 424..640;

/// A process of its own, or a namespace: what a thread never is.
const NAMESPACES: i32 = libc::CLONE_NEWNS
    | libc::CLONE_NEWCGROUP
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUSER
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET;

/// Options of sockets: level and option.
const OPTIONS: [(i32, i32); 30] = [
    (libc::SOL_SOCKET, libc::SO_REUSEADDR),
    (libc::SOL_SOCKET, libc::SO_REUSEPORT),
    (libc::SOL_SOCKET, libc::SO_KEEPALIVE),
    (libc::SOL_SOCKET, libc::SO_LINGER),
    (libc::SOL_SOCKET, libc::SO_SNDBUF),
    (libc::SOL_SOCKET, libc::SO_RCVBUF),
    (libc::SOL_SOCKET, libc::SO_SNDBUFFORCE),
    (libc::SOL_SOCKET, libc::SO_RCVBUFFORCE),
    (libc::SOL_SOCKET, libc::SO_RCVLOWAT),
    (libc::SOL_SOCKET, libc::SO_SNDTIMEO),
    (libc::SOL_SOCKET, libc::SO_RCVTIMEO),
    (libc::SOL_SOCKET, libc::SO_ZEROCOPY),
    // The same time-outs with 64 bits, on machines of 32.
    (libc::SOL_SOCKET, 66),
    (libc::SOL_SOCKET, 67),
    (libc::IPPROTO_TCP, libc::TCP_NODELAY),
    (libc::IPPROTO_TCP, libc::TCP_CORK),
    (libc::IPPROTO_TCP, libc::TCP_KEEPIDLE),
    (libc::IPPROTO_TCP, libc::TCP_KEEPINTVL),
    (libc::IPPROTO_TCP, libc::TCP_KEEPCNT),
    (libc::IPPROTO_TCP, libc::TCP_QUICKACK),
    (libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT),
    (libc::IPPROTO_TCP, libc::TCP_NOTSENT_LOWAT),
    (libc::IPPROTO_TCP, libc::TCP_CONGESTION),
    (libc::IPPROTO_TCP, libc::TCP_MAXSEG),
    // The C library's, when it looks names up.
    (libc::IPPROTO_IP, libc::IP_MTU_DISCOVER),
    (libc::IPPROTO_IP, libc::IP_RECVERR),
    (libc::IPPROTO_IPV6, libc::IPV6_RECVERR),
    (libc::IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER),
    (libc::IPPROTO_IPV6, libc::IPV6_V6ONLY),
    (libc::IPPROTO_IPV6, libc::IPV6_UNICAST_HOPS),
];

/// What lets calls pass, of the process `pid`.
pub(crate) fn allowed(pid: u32) -> Result<Rules, Error> {
    let plain = PLAIN.iter().chain(OLDER);
    let mut rules: Rules = plain.map(|&call| (call, Vec::new())).collect();
    let ours = Eq;
    for (call, of) in [
        (libc::SYS_ioctl, device_calls()?),
        (
            libc::SYS_mmap,
            vec![never(2, libc::PROT_WRITE)?, never(2, libc::PROT_EXEC)?],
        ),
        (libc::SYS_mprotect, vec![never(2, libc::PROT_EXEC)?]),
        (libc::SYS_clone, vec![thread()?]),
        (libc::SYS_socket, sockets()?),
        (libc::SYS_socketpair, vec![rule(&[word(0, Eq, libc::AF_UNIX)?])?]),
        (libc::SYS_setsockopt, options()?),
        (libc::SYS_fcntl, file_calls()?),
        (
            libc::SYS_prctl,
            vec![equals(0, libc::PR_SET_NAME)?, equals(0, libc::PR_SET_VMA)?],
        ),
        // One's own limits are read.
        (libc::SYS_prlimit64, vec![rule(&[long(0, Eq, 0)?, long(2, Eq, 0)?])?]),
        (libc::SYS_tgkill, vec![rule(&[whole(0, ours.clone(), pid)?])?]),
        (libc::SYS_kill, vec![rule(&[whole(0, ours.clone(), pid)?])?]),
        // A vectored write into one's own memory, which is told of what is not there in place of being ended by it.
        (libc::SYS_process_vm_writev, vec![rule(&[whole(0, ours, pid)?])?]),
    ] {
        rules.insert(call, of);
    }
    Ok(rules)
}

/// The calls that an old kernel may lack, without those on the list. `clone3` is among them: what it is to make lies in
/// memory, where a filter does not see it, and the C library goes back to `clone`.
pub(crate) fn newer() -> Rules {
    let listed = |call: &c_long| PLAIN.contains(call) || OLDER.contains(call);
    NEWER
        .filter(|call| !listed(call))
        .map(|call| (call, Vec::new()))
        .collect()
}

fn device_calls() -> Result<Vec<SeccompRule>, Error> {
    ioctls::used()
        .map(|request| rule(&[long(1, MaskedEq(ioctls::WHICH), request)?]))
        .collect()
}

/// A thread of this process, and in no namespace of its own.
fn thread() -> Result<SeccompRule, Error> {
    let wanted = libc::CLONE_VM | libc::CLONE_SIGHAND | libc::CLONE_THREAD;
    let mask = u64::from((wanted | NAMESPACES).cast_unsigned());
    rule(&[long(0, MaskedEq(mask), u64::from(wanted.cast_unsigned()))?])
}

/// Streams of the families that addresses have, and the datagrams by which names are looked up.
fn sockets() -> Result<Vec<SeccompRule>, Error> {
    // The kind is in the lower bits; flags are above.
    let kind = |kind| word(1, MaskedEq(0xf), kind);
    let pairs = [
        (libc::AF_UNIX, libc::SOCK_STREAM),
        (libc::AF_INET, libc::SOCK_STREAM),
        (libc::AF_INET6, libc::SOCK_STREAM),
        (libc::AF_VSOCK, libc::SOCK_STREAM),
        (libc::AF_INET, libc::SOCK_DGRAM),
        (libc::AF_INET6, libc::SOCK_DGRAM),
    ];
    let rules = pairs
        .into_iter()
        .map(|(family, of)| rule(&[word(0, Eq, family)?, kind(of)?]));
    rules.collect()
}

fn options() -> Result<Vec<SeccompRule>, Error> {
    let rules = OPTIONS
        .into_iter()
        .map(|(level, option)| rule(&[word(1, Eq, level)?, word(2, Eq, option)?]));
    rules.collect()
}

/// Descriptors, their flags, locks and seals. Not who is signalled when something comes.
fn file_calls() -> Result<Vec<SeccompRule>, Error> {
    let commands = [
        libc::F_GETFD,
        libc::F_SETFD,
        libc::F_GETFL,
        libc::F_SETFL,
        libc::F_DUPFD,
        libc::F_DUPFD_CLOEXEC,
        libc::F_SETLK,
        libc::F_SETLKW,
        libc::F_GETLK,
        libc::F_OFD_SETLK,
        libc::F_OFD_SETLKW,
        libc::F_OFD_GETLK,
        libc::F_GET_SEALS,
        libc::F_ADD_SEALS,
        libc::F_GETPIPE_SZ,
        libc::F_SETPIPE_SZ,
    ];
    commands.into_iter().map(|command| equals(1, command)).collect()
}

/// That argument `index` is `value`.
fn equals(index: u8, value: i32) -> Result<SeccompRule, Error> {
    rule(&[word(index, Eq, value)?])
}

/// That argument `index` has none of these bits.
fn never(index: u8, bits: i32) -> Result<SeccompRule, Error> {
    rule(&[long(index, MaskedEq(u64::from(bits.cast_unsigned())), 0)?])
}

fn rule(conditions: &[SeccompCondition]) -> Result<SeccompRule, Error> {
    Ok(SeccompRule::new(conditions.to_vec())?)
}

/// A condition on an `int`: the kernel takes its lower 32 bits.
fn word(index: u8, how: SeccompCmpOp, value: i32) -> Result<SeccompCondition, Error> {
    whole(index, how, value.cast_unsigned())
}

fn whole(index: u8, how: SeccompCmpOp, value: u32) -> Result<SeccompCondition, Error> {
    Ok(SeccompCondition::new(
        index,
        SeccompCmpArgLen::Dword,
        how,
        u64::from(value),
    )?)
}

/// A condition on all 64 bits.
fn long(index: u8, how: SeccompCmpOp, value: u64) -> Result<SeccompCondition, Error> {
    Ok(SeccompCondition::new(index, SeccompCmpArgLen::Qword, how, value)?)
}
