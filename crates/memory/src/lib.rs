//! Guest RAM: backings, hole scan, dirty trackers, page I/O
