//! The board: everything that a vCPU reaches by ports, by addresses that are not RAM, and by doorbells.
