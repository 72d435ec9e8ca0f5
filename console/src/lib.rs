//! Output of the command-line programs: results on standard output, one line about each error on
//! standard error.
//!
//! `println!` and `eprintln!` panic when the write fails, so the programs use the functions here
//! instead, and deny clippy's `print_stdout` and `print_stderr`. When the reader of the output
//! closed the pipe (`urnic doctor | head -1`), the program ends silently with [`READER_GONE`], the
//! status that a shell shows for a program that SIGPIPE ended. Any other failed write (`ENOSPC`) is
//! an ordinary error.

#![forbid(unsafe_code)]
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod arguments;
mod output;

pub use arguments::{Parsed, USAGE, parsed};
pub use output::{READER_GONE, Unwritten, complain, escaped, escaped_json, print};
