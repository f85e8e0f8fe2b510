//! Flags, units, exit codes and report output shared by the three commands
