//! The values of options: reading them from text, and writing them as text.

use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::time::Duration;

use urnic_wire::mpa::startup::RtrKey;

use crate::settings::{Device, RtrTypes};

pub(crate) fn truth(text: &str) -> Option<bool> {
    match text.to_ascii_lowercase().as_str() {
        "true" | "on" | "yes" | "1" => Some(true),
        "false" | "off" | "no" | "0" => Some(false),
        _ => None,
    }
}

pub(crate) fn number<T: TryFrom<u32>>(text: &str, range: RangeInclusive<u32>) -> Option<T> {
    let number = text.parse().ok().filter(|n| range.contains(n))?;
    T::try_from(number).ok()
}

pub(crate) fn seconds(text: &str) -> Option<Duration> {
    number(text, 1..=3600).map(Duration::from_secs)
}

pub(crate) fn milliseconds(text: &str) -> Option<Duration> {
    number(text, 0..=600_000).map(Duration::from_millis)
}

/// Parses a file name, or the empty text: `Some(None)`.
pub(crate) fn path(text: &str) -> Option<Option<PathBuf>> {
    Some((!text.is_empty()).then(|| PathBuf::from(text)))
}

pub(crate) fn show_path(path: Option<&Path>) -> String {
    path.map(|path| path.display().to_string()).unwrap_or_default()
}

/// Parses a value or `any`: `any` (also the empty text) is `Some(None)`.
pub(crate) fn either<T>(text: &str, parse: impl Fn(&str) -> Option<T>) -> Option<Option<T>> {
    if matches!(text, "" | "any") {
        Some(None)
    } else {
        parse(text).map(Some)
    }
}

pub(crate) fn ports(text: &str) -> Option<RangeInclusive<u16>> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    let (first, last): (u16, u16) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
    (first >= 1 && first <= last).then_some(first..=last)
}

pub(crate) fn rtr_types(text: &str) -> Option<RtrTypes> {
    let mut types = RtrTypes {
        send: false,
        write: false,
        read: false,
    };
    for name in text.split(',') {
        match name.trim() {
            "send" => types.send = true,
            "write" => types.write = true,
            "read" => types.read = true,
            _ => return None,
        }
    }
    Some(types)
}

pub(crate) fn rtr_frame(text: &str) -> Option<Option<RtrKey>> {
    match text {
        "off" => Some(None),
        "hex" => Some(Some(RtrKey::Hex)),
        "text" => Some(Some(RtrKey::Text)),
        _ => None,
    }
}

pub(crate) fn show_rtr_types(types: RtrTypes) -> String {
    let named = [(types.send, "send"), (types.write, "write"), (types.read, "read")];
    named
        .iter()
        .filter(|(on, _)| *on)
        .map(|(_, name)| *name)
        .collect::<Vec<_>>()
        .join(",")
}

/// Parses `vfio-user:PATH`, `vfio:DDDD:BB:DD.F` or `inproc`.
pub(crate) fn device(text: &str) -> Option<Device> {
    if text == "inproc" {
        return Some(Device::Inproc);
    }
    if let Some(path) = text.strip_prefix("vfio-user:") {
        return self::path(path)?.map(Device::VfioUser);
    }
    let bdf = text.strip_prefix("vfio:")?;
    let fields: Vec<&str> = bdf.split([':', '.']).collect();
    let widths = [4, 2, 2, 1];
    let good = fields.len() == widths.len()
        && bdf.as_bytes().get(10) == Some(&b'.')
        && fields
            .iter()
            .zip(widths)
            .all(|(f, width)| f.len() == width && f.bytes().all(|b| b.is_ascii_hexdigit()));
    good.then(|| Device::Vfio(bdf.to_owned()))
}
