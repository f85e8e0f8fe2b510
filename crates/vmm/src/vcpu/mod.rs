//! vCPUs and their threads.
