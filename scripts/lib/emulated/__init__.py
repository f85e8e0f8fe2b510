"""What scripts that run Linux in an emulator share: packages, archives, processes that end with their parent."""
