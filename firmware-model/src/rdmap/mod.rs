//! RDMAP: what one queue pair does with messages.
