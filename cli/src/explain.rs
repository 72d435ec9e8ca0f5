//! `urnic explain`: the meaning of a completion's status, a `vendor_err`, or an error number with
//! this device.

mod errnos;

use std::fmt::Write as _;

use urnic_wire::rdmap::TerminateError;

use crate::answer::{Failure, width, wrapped};
use errnos::ERRNOS;
use urnic_sys::errno;

/// A status, and when it occurs, or why it does not: as in `docs/reference/statuses.md`.
struct Status {
    number: u32,
    name: &'static str,
    when: &'static str,
    occurs: bool,
}

const fn occurs(number: u32, name: &'static str, when: &'static str) -> Status {
    Status {
        number,
        name,
        when,
        occurs: true,
    }
}

const fn never(number: u32, name: &'static str, when: &'static str) -> Status {
    Status {
        number,
        name,
        when,
        occurs: false,
    }
}

const RELIABLE_DATAGRAMS: &str = "they belong to reliable datagrams, which iWARP does not have";

const STATUSES: [Status; 24] = [
    occurs(0, "SUCCESS", ""),
    occurs(
        1,
        "LOC_LEN_ERR",
        "the receive is shorter than the message; a request of more than 2 GiB; a datagram longer than the port's `active_mtu`; an atomic of a length other than eight bytes",
    ),
    occurs(
        2,
        "LOC_QP_OP_ERR",
        "a Read or atomic while `max_rd_atomic` is 0; a request that the type of the queue pair does not have (a Read on UC or UD); a malformed work queue entry",
    ),
    never(3, "LOC_EEC_OP_ERR", RELIABLE_DATAGRAMS),
    occurs(
        4,
        "LOC_PROT_ERR",
        "an element of a request or receive is not within its region, the key does not belong to the domain, or the region lacks the right (of a Read or an atomic when the answer arrives, so that the peer has carried it out); with `--identity iwarp`, `LOCAL_INV` of an STag that cannot be invalidated; memory of the request or receive was unmapped, protected or truncated while registered",
    ),
    occurs(
        5,
        "WR_FLUSH_ERR",
        "the queue pair was in error; on rdma_cm connections also when no other status applies",
    ),
    occurs(
        6,
        "MW_BIND_ERR",
        "the region lacks `IBV_ACCESS_MW_BIND` or the rights; a window of type 2 that is already bound; with `--identity roce`, `LOCAL_INV` of anything but a window of type 2 that is bound to the queue pair, as with mlx5",
    ),
    never(
        7,
        "BAD_RESP_ERR",
        "a Response without a matching Read ends the stream with a local Terminate (RFC 5040 §5.4): the requests are flushed, and the Read has `LOC_PROT_ERR` if its own memory was at fault",
    ),
    never(
        8,
        "LOC_ACCESS_ERR",
        "it is for Writes with immediate data whose *target* is refused, at the target. Here the Write ends the stream before its immediate data takes a receive",
    ),
    occurs(
        9,
        "REM_INV_REQ_ERR",
        "the message is longer than the peer's receive; a message that the peer does not support; an atomic at an address that is no multiple of eight, with any key. Of a receive: the Send invalidates an STag that it may not invalidate",
    ),
    occurs(
        10,
        "REM_ACCESS_ERR",
        "the key is invalid at the peer; the Send may not invalidate it; the access is not within the region, or the region lacks the right; the memory of its region was unmapped, protected or truncated while registered",
    ),
    occurs(
        11,
        "REM_OP_ERR",
        "the peer's receive names no memory, or unmapped memory; the peer refuses the answer to its own Read, for which it has no memory; on rdma_cm connections, no receive in time",
    ),
    occurs(
        12,
        "RETRY_EXC_ERR",
        "the peer is unreachable, has ended, or ended the connection before it confirmed the request; its host was silent \
         for the time that `timeout` and `retry_cnt` permit; an error of the stream (CRC)",
    ),
    occurs(
        13,
        "RNR_RETRY_EXC_ERR",
        "the peer had no receive for as long as `rnr_retry` and its `min_rnr_timer` permit",
    ),
    never(14, "LOC_RDD_VIOL_ERR", RELIABLE_DATAGRAMS),
    never(15, "REM_INV_RD_REQ_ERR", "it belongs to reliable datagrams"),
    never(16, "REM_ABORT_ERR", "a peer cannot abort a request"),
    never(17, "INV_EECN_ERR", RELIABLE_DATAGRAMS),
    never(18, "INV_EEC_STATE_ERR", RELIABLE_DATAGRAMS),
    never(
        19,
        "FATAL_ERR",
        "a lost device flushes (`WR_FLUSH_ERR`) and reports `IBV_EVENT_DEVICE_FATAL`",
    ),
    never(20, "RESP_TIMEOUT_ERR", "it belongs to datagrams"),
    never(21, "GENERAL_ERR", "every error here has a specific status"),
    never(22, "TM_ERR", "they belong to tag matching"),
    never(23, "TM_RNDV_INCOMPLETE", "they belong to tag matching"),
];

/// Most characters in a line on a terminal: longer lines are hard to read.
const LONGEST: usize = 100;

/// The end of every explanation.
const MORE: &str = "The log of both ends names the request and the memory: docs/guide/troubleshooting.md, \
                    \"A request is refused\". All statuses: docs/reference/statuses.md.";

/// The explanation of each argument.
pub(crate) fn explain(asked: &[String]) -> Result<String, Failure> {
    let mut text = String::new();
    for asked in asked {
        text += &of_one(asked)?;
    }
    let _ = writeln!(text, "{MORE}");
    Ok(match width() {
        Some(width) => folded(&text, width.min(LONGEST)),
        None => text,
    })
}

/// The lines of a text, folded for a terminal.
fn folded(text: &str, width: usize) -> String {
    let lines = text.lines().flat_map(|line| wrapped(line, width, 4));
    lines.map(|line| line + "\n").collect()
}

/// The meanings of one argument, a line each. A number may be a status of a completion, an error
/// number, and a `vendor_err`: all that it can be are shown, the likeliest one first.
fn of_one(asked: &str) -> Result<String, Failure> {
    let hex = asked.strip_prefix("0x").or_else(|| asked.strip_prefix("0X"));
    let number = match hex {
        Some(hex) => u32::from_str_radix(hex, 16).ok(),
        None => asked.parse().ok(),
    };
    let negative = asked.strip_prefix('-').and_then(|number| number.parse().ok());
    let lines = match (number, negative) {
        (Some(number), _) => of_number(number, hex.is_some()),
        // Functions of the kernel return error numbers as negative ones.
        (None, Some(number)) => Vec::from_iter(of_errno(number)),
        (None, None) => Vec::from_iter(of_name(asked)),
    };
    match lines.is_empty() {
        false => Ok(lines.concat()),
        true => Err(Failure::usage(format!(
            "{asked:?} is no status (0 to 23, or a name as IBV_WC_REM_ACCESS_ERR), no vendor_err (a number \
             as 0x1100c000), and no error number (a name as EINVAL, a number as 22 or -22)"
        ))),
    }
}

fn of_name(name: &str) -> Option<String> {
    let name = name.to_ascii_uppercase();
    let status = name.strip_prefix("IBV_WC_").unwrap_or(&name);
    let status = STATUSES.iter().find(|known| known.name == status);
    status.map(of_status).or_else(|| of_errno(errno::number(&name)?))
}

fn of_number(number: u32, hex: bool) -> Vec<String> {
    let status = STATUSES.iter().find(|status| status.number == number);
    let as_errno = i32::try_from(number)
        .ok()
        .filter(|_| !hex || number > 23)
        .and_then(of_errno);
    let is_known = |(name, _): &(&str, &str)| i32::try_from(number).ok() == errno::number(name);
    match (status, as_errno) {
        // What programs mostly ask about comes first: not a status that this device never has.
        (Some(status), Some(of_errno)) if ERRNOS.iter().any(is_known) => {
            let mut lines = vec![of_status(status), of_errno];
            if !status.occurs {
                lines.reverse();
            }
            lines
        }
        (Some(status), _) if number == 0 => vec![of_status(status), of_vendor_error(0)],
        (Some(status), _) => vec![of_status(status)],
        (None, Some(of_errno)) => vec![of_errno],
        // The layer, error type and code alone, as logs and captures show them.
        (None, None) if (0x100..=0xffff).contains(&number) => vec![of_vendor_error(number << 16)],
        (None, None) => vec![of_vendor_error(number)],
    }
}

/// An error number, and where verbs and librdmacm return it.
fn of_errno(number: i32) -> Option<String> {
    let name = errno::name(number)?;
    let text = std::io::Error::from_raw_os_error(number).to_string();
    let text = text.split(" (os error").next().unwrap_or_default();
    let when = ERRNOS.iter().find(|(known, _)| *known == name);
    let when = when.map_or("the verbs of this device do not return it", |(_, when)| when);
    Some(format!(
        "{name} (errno {number}, {text}): {}.\n",
        when.replace('`', "")
    ))
}

fn of_status(status: &Status) -> String {
    let Status { number, name, .. } = status;
    let when = status.when.replace(['`', '*'], "");
    match (status.occurs, *number) {
        (true, 0) => format!("{number} IBV_WC_{name}: the request is complete.\n"),
        (true, _) => format!("{number} IBV_WC_{name}: {when}.\n"),
        (false, _) => {
            let why = when.replace("they belong", "it belongs");
            format!("{number} IBV_WC_{name} does not occur with this device: {why}.\n")
        }
    }
}

/// The first word of a Terminate (RFC 5040 §4.8).
fn of_vendor_error(control: u32) -> String {
    if control == 0 {
        return "vendor_err 0: the error is local, or the peer sent no Terminate.\n".to_owned();
    }
    let [_, _, headers, _] = control.to_be_bytes();
    let (layer, etype, code) = TerminateError::codes_of(control);
    let error = match TerminateError::of_control(control) {
        Some(error) => error.to_string(),
        None => "no error that an RFC defines".to_owned(),
    };
    let layer_name = ["RDMAP", "DDP", "LLP (MPA)"].get(usize::from(layer));
    let layer_name = layer_name.unwrap_or(&"unknown");
    let parts = [
        (0x80, "the segment's length"),
        (0x40, "its DDP header"),
        (0x20, "its Read Request"),
    ];
    let present = parts
        .iter()
        .filter(|(bit, _)| headers & bit != 0)
        .map(|(_, part)| *part);
    let present: Vec<_> = present.collect();
    let with = match present.is_empty() {
        true => "nothing of the message at fault".to_owned(),
        false => present.join(", "),
    };
    format!(
        "vendor_err {control:#010x}: the peer's Terminate says \"{error}\" (layer {layer}, {layer_name}; error type \
         {etype}; code {code:#04x}), with {with}.\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_of_statuses_agrees() {
        let page = include_str!("../../docs/reference/statuses.md");
        let rows: Vec<Vec<&str>> = page
            .lines()
            .filter(|line| line.starts_with('|'))
            .map(|line| line.split('|').map(str::trim).collect())
            .collect();
        for status in &STATUSES {
            let name = format!("`{}`", status.name);
            let row = rows.iter().find(|row| row[2].split(", ").any(|n| n == name));
            let row = row.unwrap_or_else(|| panic!("no {name} in docs/reference/statuses.md"));
            assert!(
                row[1].split(", ").any(|n| n == status.number.to_string()),
                "{row:?}"
            );
            assert_eq!(row[3], status.when, "{name}");
            // Rows of statuses that occur also have the vendor_err.
            assert_eq!(row.len() == 6, status.occurs, "{row:?}");
        }
    }

    #[test]
    fn the_page_has_the_same_error_numbers() {
        let page = include_str!("../../docs/reference/statuses.md");
        let section = page
            .split("\n## ")
            .find(|section| section.starts_with("Error numbers"));
        let rows = section.expect("Error numbers").lines();
        let rows = rows.filter_map(|row| row.strip_prefix("| `")?.strip_suffix(" |")?.split_once("` | "));
        assert_eq!(rows.collect::<Vec<_>>(), ERRNOS);
    }

    #[test]
    fn explanations_fit_a_terminal() {
        for status in &STATUSES {
            let text = of_status(status);
            let folded = folded(&text, 80);
            assert!(folded.lines().all(|line| line.chars().count() <= 80), "{folded}");
            let words = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
            assert_eq!(words(&folded), words(&text));
        }
    }

    #[test]
    fn statuses_and_vendor_errors_are_distinguished() {
        let of = |what| of_one(what).unwrap();
        for what in ["10", "rem_access_err", "IBV_WC_REM_ACCESS_ERR"] {
            assert!(of(what).starts_with("10 IBV_WC_REM_ACCESS_ERR: the key is invalid at the peer"));
        }
        assert!(of("7").starts_with("7 IBV_WC_BAD_RESP_ERR does not occur"));
        let write = of("0x1100c000");
        assert!(
            write.contains("\"DDP invalid STag\" (layer 1, DDP; error type 1; code 0x00)"),
            "{write}"
        );
        assert!(
            write.ends_with("with the segment's length, its DDP header.\n"),
            "{write}"
        );
        assert_eq!(of("285261824"), write, "as perftest prints it");
        assert!(of("0x0").contains("local"));
        assert!(of("0xffffffff").contains("no error that an RFC defines"));
        for wrong in ["", "EINVALID", "0x", "-0", "-134", "4294967296", "1.5"] {
            assert!(of_one(wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn error_numbers_are_no_vendor_errors() {
        let of = |what| of_one(what).unwrap();
        let memory = "ENOMEM (errno 12, Cannot allocate memory): posting: the queue is full";
        for what in ["enomem", "ENOMEM", "-12"] {
            assert!(of(what).starts_with(memory), "{}", of(what));
        }
        for what in ["71", "-71", "EPROTO"] {
            assert!(
                of(what).starts_with("EPROTO (errno 71, Protocol error): the peer"),
                "{}",
                of(what)
            );
        }
        assert!(of("EXDEV").contains("do not return it"));
    }

    #[test]
    fn a_number_with_two_meanings_has_two_lines() {
        let lines = |what| {
            let text = of_one(what).unwrap();
            text.lines().map(str::to_owned).collect::<Vec<_>>()
        };
        let both = lines("12");
        assert!(
            both[0].starts_with("12 IBV_WC_RETRY_EXC_ERR: ") && both[1].starts_with("ENOMEM "),
            "{both:?}"
        );
        let both = lines("22");
        assert!(
            both[0].starts_with("EINVAL ") && both[1].starts_with("22 IBV_WC_TM_ERR does not"),
            "{both:?}"
        );
        let both = lines("0");
        assert!(
            both[0].starts_with("0 IBV_WC_SUCCESS") && both[1].starts_with("vendor_err 0: "),
            "{both:?}"
        );
        assert_eq!(lines("0xc").len(), 1, "no error number in hexadecimal");
    }

    #[test]
    fn layer_type_and_code_alone_are_a_vendor_error() {
        let short = of_one("0x1202").unwrap();
        assert!(short.contains("layer 1, DDP; error type 2; code 0x02"), "{short}");
        assert_eq!(of_one("4610").unwrap(), short);
    }
}
