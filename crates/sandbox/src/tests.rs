//! Each test enters the sandbox on a thread of its own, which is all that it binds: filters and Landlock are a thread's, and
//! only `enter` puts them on all.

use super::*;
use libc::c_long;
use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream, ToSocketAddrs};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// Does something on a thread that has entered the sandbox.
fn inside<T: Send>(files: &Files, something: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            no_new_privileges().unwrap();
            match files.enforce_on_this_thread() {
                Ok(()) => {}
                Err(error) => println!("SKIPPED: the part about files: {error}"),
            }
            let filters = Filters::new(std::process::id()).unwrap();
            seccompiler::apply_filter(&filters.newer).unwrap();
            seccompiler::apply_filter(&filters.allowed).unwrap();
            something()
        });
        thread.join().unwrap()
    })
}

/// What a call with these arguments says: the error's number, or 0.
fn call(number: c_long, arguments: [c_long; 6]) -> i32 {
    let [a, b, c, d, e, f] = arguments;
    // SAFETY: the tests give no pointer but null, no length but of nothing, and no descriptor but one that is not there, or
    // their own: a call that was let pass does no more than fail.
    let said = unsafe { libc::syscall(number, a, b, c, d, e, f) };
    if said == -1 {
        io::Error::last_os_error().raw_os_error().unwrap()
    } else {
        0
    }
}

/// Calls with arguments of which the kernel, for a privileged caller, says another thing than EPERM.
fn forbidden() -> Vec<(&'static str, c_long, [c_long; 6])> {
    let null = [0; 6];
    let pid = c_long::from(std::process::id());
    let netlink = c_long::from(libc::AF_NETLINK);
    let (raw, stream) = (c_long::from(libc::SOCK_RAW), c_long::from(libc::SOCK_STREAM));
    let everything = c_long::from(libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC);
    let private = c_long::from(libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    vec![
        ("execve", libc::SYS_execve, null),
        ("execveat", libc::SYS_execveat, [-1, 0, 0, 0, 0, 0]),
        (
            "ptrace",
            libc::SYS_ptrace,
            [c_long::from(libc::PTRACE_ATTACH), 0, 0, 0, 0, 0],
        ),
        ("mount", libc::SYS_mount, null),
        ("umount2", libc::SYS_umount2, null),
        ("pivot_root", libc::SYS_pivot_root, null),
        ("chroot", libc::SYS_chroot, null),
        ("init_module", libc::SYS_init_module, null),
        ("finit_module", libc::SYS_finit_module, [-1, 0, 0, 0, 0, 0]),
        ("delete_module", libc::SYS_delete_module, null),
        ("kexec_load", libc::SYS_kexec_load, [0, 1 << 20, 0, 0, 0, 0]),
        ("bpf", libc::SYS_bpf, [-1, 0, 0, 0, 0, 0]),
        ("keyctl", libc::SYS_keyctl, [-1, 0, 0, 0, 0, 0]),
        ("add_key", libc::SYS_add_key, null),
        ("request_key", libc::SYS_request_key, null),
        ("perf_event_open", libc::SYS_perf_event_open, null),
        ("process_vm_readv", libc::SYS_process_vm_readv, [pid, 0, 0, 0, 0, 0]),
        (
            "process_vm_writev into another",
            libc::SYS_process_vm_writev,
            [1, 0, 0, 0, 0, 0],
        ),
        ("kill of another", libc::SYS_kill, [1, 0, 0, 0, 0, 0]),
        ("kill of a group", libc::SYS_kill, [0, 0, 0, 0, 0, 0]),
        ("tgkill of another", libc::SYS_tgkill, [1, 1, 0, 0, 0, 0]),
        ("unshare", libc::SYS_unshare, null),
        ("setns", libc::SYS_setns, [-1, 0, 0, 0, 0, 0]),
        ("setuid", libc::SYS_setresuid, [-1, -1, -1, 0, 0, 0]),
        ("personality", libc::SYS_personality, [0xffff_ffff, 0, 0, 0, 0, 0]),
        ("open_by_handle_at", libc::SYS_open_by_handle_at, [-1, 0, 0, 0, 0, 0]),
        ("linkat", libc::SYS_linkat, null),
        ("symlinkat", libc::SYS_symlinkat, null),
        ("mkdirat", libc::SYS_mkdirat, null),
        ("mknodat", libc::SYS_mknodat, null),
        ("fchown", libc::SYS_fchown, [-1, 0, 0, 0, 0, 0]),
        ("seccomp", libc::SYS_seccomp, [-1, 0, 0, 0, 0, 0]),
        ("a netlink socket", libc::SYS_socket, [netlink, raw, 0, 0, 0, 0]),
        (
            "a raw socket",
            libc::SYS_socket,
            [c_long::from(libc::AF_INET), raw, 1, 0, 0, 0],
        ),
        (
            "a packet socket",
            libc::SYS_socket,
            [c_long::from(libc::AF_PACKET), raw, 0, 0, 0, 0],
        ),
        (
            "a pair of another family",
            libc::SYS_socketpair,
            [netlink, stream, 0, 0, 0, 0],
        ),
        ("a filter on a socket", libc::SYS_setsockopt, [-1, 1, 26, 0, 0, 0]),
        ("iptables", libc::SYS_setsockopt, [-1, 0, 64, 0, 0, 0]),
        ("typing into a terminal", libc::SYS_ioctl, [-1, 0x5412, 0, 0, 0, 0]),
        ("an emulated device of KVM's", libc::SYS_ioctl, [-1, 0xaee0, 0, 0, 0, 0]),
        (
            "memory to write and execute",
            libc::SYS_mmap,
            [0, 4096, everything, private, -1, 0],
        ),
        ("code out of data", libc::SYS_mprotect, [4096, 0, everything, 0, 0, 0]),
        ("another signal for input", libc::SYS_fcntl, [-1, 10, 0, 0, 0, 0]),
        (
            "a dump of memory",
            libc::SYS_prctl,
            [c_long::from(libc::PR_SET_DUMPABLE), 1, 0, 0, 0, 0],
        ),
        ("limits", libc::SYS_prlimit64, [0, 7, 1, 0, 0, 0]),
        (
            "a process",
            libc::SYS_clone,
            [c_long::from(libc::CLONE_THREAD), 0, 0, 0, 0, 0],
        ),
        (
            "a thread in a namespace",
            libc::SYS_clone,
            [namespaced_thread(), 0, 0, 0, 0, 0],
        ),
    ]
}

fn namespaced_thread() -> c_long {
    c_long::from(libc::CLONE_THREAD | libc::CLONE_SIGHAND | libc::CLONE_VM | libc::CLONE_NEWUSER)
}

#[test]
fn what_is_not_used_is_forbidden() {
    let said = inside(&Files::new(), || {
        let said = |(name, number, arguments)| (name, call(number, arguments));
        forbidden().into_iter().map(said).collect::<Vec<_>>()
    });
    for (name, error) in said {
        assert_eq!(error, libc::EPERM, "{name}");
    }
}

#[test]
fn what_is_newer_than_the_list_is_answered_as_an_old_kernel_would() {
    let calls = [
        libc::SYS_clone3,
        libc::SYS_io_uring_setup,
        libc::SYS_pidfd_open,
        libc::SYS_openat2,
        libc::SYS_fsopen,
        libc::SYS_landlock_create_ruleset,
        600,
    ];
    let said = inside(&Files::new(), || calls.map(|number| call(number, [0; 6])));
    assert_eq!(said, calls.map(|_| libc::ENOSYS));
    let old = inside(&Files::new(), || call(423, [0; 6]));
    assert_eq!(old, libc::EPERM, "below the new ones there is a gap that nobody uses");
}

#[test]
fn no_program_is_run() {
    let error = inside(&Files::new(), || Command::new("/bin/true").spawn().map(drop)).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EPERM), "{error}");
}

#[test]
fn threads_sockets_names_and_memory_are_as_ever() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    inside(&Files::new().makes(&path), || {
        let thread = std::thread::Builder::new()
            .name("named".to_owned())
            .spawn(|| 1)
            .unwrap();
        assert_eq!(thread.join().unwrap(), 1);
        assert!(std::thread::available_parallelism().unwrap().get() >= 1);
        std::thread::sleep(Duration::from_millis(1));
        assert!(("localhost", 1).to_socket_addrs().unwrap().count() >= 1);

        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        client.set_nodelay(true).unwrap();
        client.set_write_timeout(Some(Duration::from_secs(60))).unwrap();
        client.write_all(b"word").unwrap();
        client.shutdown(std::net::Shutdown::Write).unwrap();
        let mut heard = String::new();
        listener.accept().unwrap().0.read_to_string(&mut heard).unwrap();
        assert_eq!(heard, "word");
        let server = UnixListener::bind(&path).unwrap();
        drop((
            UnixStream::connect(&path).unwrap(),
            server.accept().unwrap(),
            UnixStream::pair().unwrap(),
        ));
        std::fs::remove_file(&path).unwrap();

        drop(vec![1u8; 64 << 20]);
        let memory = rustix::fs::memfd_create("ram", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&memory, 1 << 20).unwrap();
        assert!(
            std::fs::read_to_string("/proc/thread-self/status")
                .unwrap()
                .contains("Seccomp:\t2")
        );
        assert!(
            std::fs::read_to_string("/proc/meminfo")
                .unwrap()
                .contains("MemAvailable")
        );
        drop(File::open("/proc/self/pagemap").unwrap());
        // A descriptor that is not there: the call was let pass.
        assert_eq!(call(libc::SYS_ioctl, [-1, 0xae80, 0, 0, 0, 0]), libc::EBADF);
        let pid = c_long::from(std::process::id());
        assert_eq!(call(libc::SYS_process_vm_writev, [pid, 0, 0, 0, 0, 0]), 0);
    });
}

/// Whether this kernel limits files; says so, loudly, where it does not.
fn no_landlock(test: &str) -> bool {
    let missing = inside(&Files::new(), || File::open("/etc/passwd").is_ok());
    if missing {
        println!("SKIPPED: {test}: this kernel has no Landlock");
    }
    missing
}

#[test]
fn files_that_were_not_named_cannot_be_opened() {
    if no_landlock("files that were not named") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    std::fs::create_dir(at("out")).unwrap();
    for name in ["kernel", "secret", "out/old"] {
        std::fs::write(at(name), name).unwrap();
    }
    let files = Files::new().reads(at("kernel")).makes(at("out/report"));
    let denied = |done: io::Result<()>| assert_eq!(done.unwrap_err().kind(), ErrorKind::PermissionDenied);
    inside(&files, || {
        assert_eq!(std::fs::read_to_string(at("kernel")).unwrap(), "kernel");
        denied(std::fs::write(at("kernel"), "changed"));
        denied(File::open(at("secret")).map(drop));
        denied(File::create(at("new")).map(drop));
        denied(std::fs::remove_file(at("kernel")));
        denied(File::open(Path::new("/etc/passwd")).map(drop));
        denied(File::open(Path::new("/proc/1/status")).map(drop));
        std::fs::write(at("out/.report"), "report").unwrap();
        std::fs::rename(at("out/.report"), at("out/report")).unwrap();
        std::fs::write(at("out/report"), "longer report").unwrap();
        // Out of the folder it does not get, whatever is written into it.
        assert!(std::fs::rename(at("out/report"), at("report")).is_err());
        std::fs::remove_file(at("out/report")).unwrap();
    });
    assert_eq!(std::fs::read_to_string(at("kernel")).unwrap(), "kernel");
}

#[test]
fn what_is_held_in_proc_is_found_again() {
    inside(&Files::new(), || {
        for _ in 0..100 {
            drop(File::open("/proc/self/pagemap").unwrap());
            drop(File::open("/proc/meminfo").unwrap());
        }
    });
}

#[test]
fn a_process_of_several_threads_is_told_that_landlock_would_not_bind_them() {
    let (end, ended) = std::sync::mpsc::channel::<()>();
    let thread = std::thread::spawn(move || ended.recv());
    assert!(matches!(Files::new().enforce(), Err(Error::Threads(2..))));
    drop(end);
    assert!(thread.join().unwrap().is_err());
}
