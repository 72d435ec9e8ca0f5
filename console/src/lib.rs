//! What the command-line programs write, and how: results on standard output, one line about each
//! error on standard error.
//!
//! `println!` and `eprintln!` panic when the write fails, so the programs use the functions here
//! instead, and deny clippy's `print_stdout` and `print_stderr`. Output whose reader has left
//! (`urnic doctor | head -1`) ends the program without a word and with [`READER_GONE`], the status
//! that a shell shows for a program that SIGPIPE ended. Any other failed write (`ENOSPC`) is an
//! error like others.

#![forbid(unsafe_code)]
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod arguments;
mod output;

pub use arguments::{Parsed, USAGE, parsed};
pub use output::{READER_GONE, Unwritten, complain, print};
