//! Boots a Linux kernel on this terminal, and ends when it does: `boot KERNEL INITRD MEMORY_MIB VCPUS COMMAND_LINE`.

use pages::Layout;
use std::error::Error;
use std::sync::Arc;
use std::time::Duration;
use vmm::{BootFiles, Console, LinuxGuest, Tracking, VmConfig};

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, kernel, initrd, memory_mib, vcpus, cmdline] = &arguments[..] else {
        return Err("give KERNEL INITRD MEMORY_MIB VCPUS COMMAND_LINE".into());
    };
    let config = VmConfig {
        layout: Arc::new(Layout::pc(memory_mib.parse::<u64>()? << 8)?),
        vcpus: vcpus.parse()?,
        balloon: None,
        tracking: Tracking::Auto,
    };
    let files = BootFiles {
        kernel: kernel.into(),
        initrd: Some(initrd.into()),
        cmdline: cmdline.clone(),
    };
    let console = Console {
        input: None,
        output: Box::new(std::io::stdout()),
    };
    let guest = LinuxGuest::boot(config, &files, console)?;
    loop {
        if let Some(ended) = guest.ended(Duration::from_secs(3600)) {
            eprintln!("the guest ended: {ended}");
            return Ok(());
        }
    }
}
