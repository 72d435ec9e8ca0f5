//! System calls of a message: those that succeeded, because a program that spins makes any number
//! of calls that find nothing.

use std::time::Duration;

use urnic_tests::skip::installed;
use urnic_tests::{Folder, Program};

use crate::place::{ENDS_WITH_PARENT, Place};
use crate::table::Measured;

const LIMIT: Duration = Duration::from_secs(60);

/// Calls that send and receive.
const TRACED: &str = "--trace=sendto,sendmsg,sendmmsg,recvfrom,recvmsg,recvmmsg,read,write,readv,writev";

/// Messages of two runs. What a program does once is in both.
const FEW: u32 = 500;
const MANY: u32 = 1500;

/// Calls of both ends for each of the messages, whose number `program` gets.
pub(crate) fn per_message(place: &Place, program: impl Fn(u32) -> Program) -> Measured<f64> {
    let [few, many] = [FEW, MANY].map(|count| calls(place, &program(count)));
    Ok((many? - few?) / f64::from(MANY - FEW))
}

/// All calls of both ends.
fn calls(place: &Place, program: &Program) -> Measured<f64> {
    installed("strace")?;
    let folder = Folder::new("calls");
    let files = ["server", "client"].map(|end| folder.file(end));
    let [server, client] = files.each_ref().map(|file| {
        let file = file.to_string_lossy();
        let words = ["strace", "-f", "-c", TRACED, "-o", &file, "--"];
        program.clone().through(ENDS_WITH_PARENT).through(words)
    });
    let mut pair = place.pair(&server).within(LIMIT);
    pair.client = place.client(&client);
    pair.succeeds();
    let mut sum = 0.0;
    for file in files {
        let text = std::fs::read_to_string(&file).map_err(|error| format!("{}: {error}", file.display()))?;
        sum += succeeded(&text).ok_or("strace printed no total")?;
    }
    Ok(sum)
}

/// The calls without the errors of strace's last line: share, seconds, time of a call, calls,
/// errors if there are any, `total`.
fn succeeded(text: &str) -> Option<f64> {
    let line = text.lines().rfind(|line| line.ends_with(" total"))?;
    let mut figures = line.split_whitespace().map(str::parse::<f64>).skip(3);
    let calls = figures.next()?.ok()?;
    Some(calls - figures.next()?.unwrap_or(0.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failed_calls_are_not_counted() {
        let text = "% time     seconds  usecs/call     calls    errors syscall\n\
                    ------ ----------- ----------- --------- --------- ----------------\n \
                    99.00    0.044532           8      5070       70 recvfrom\n\
                    ------ ----------- ----------- --------- --------- ----------------\n\
                    100.00    0.044532           8      5070        70 total\n";
        assert_eq!(succeeded(text), Some(5000.0));
        assert_eq!(
            succeeded("100.00    0.044532           8      5070           total\n"),
            Some(5070.0)
        );
        assert_eq!(succeeded(""), None);
    }
}
