//! Names of devices.

/// Most devices of a process.
pub const MAX_DEVICES: u32 = 64;

/// Longest name of a device, as in the kernel (`IB_DEVICE_NAME_MAX` with its end).
pub(crate) const LONGEST_NAME: usize = 63;

/// The digits at the end of a name that count on; more would overflow.
const MOST_DIGITS: usize = 9;

/// Whether a device may have this name: it is a file name in sysfs, and programs put it into lists
/// and before a colon and the port's number.
pub(crate) fn is_name(text: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"_-.".contains(&byte);
    (1..=LONGEST_NAME).contains(&text.len()) && text.bytes().all(plain) && !text.starts_with(['.', '-'])
}

/// The name that is `count` names after `name`: the number at its end counts on.
pub(crate) fn counted(name: &str, count: u32) -> String {
    if count == 0 {
        return name.to_owned();
    }
    let digits = name
        .bytes()
        .rev()
        .take_while(u8::is_ascii_digit)
        .count()
        .min(MOST_DIGITS);
    let (stem, number) = name.split_at(name.len() - digits);
    let next = number.parse::<u64>().unwrap_or(0) + u64::from(count);
    format!("{stem}{next:0digits$}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_at_the_end_of_a_name_counts_on() {
        for (name, count, next) in [
            ("urnic0", 0, "urnic0"),
            ("urnic0", 1, "urnic1"),
            ("mlx5_0", 3, "mlx5_3"),
            ("mlx5_9", 1, "mlx5_10"),
            ("rail", 0, "rail"),
            ("rail", 2, "rail2"),
            ("rail08", 2, "rail10"),
            ("rail07", 1, "rail08"),
            ("7", 1, "8"),
            ("a999999999999", 1, "a9991000000000"),
        ] {
            assert_eq!(counted(name, count), next);
        }
    }

    #[test]
    fn names_are_file_names_without_separators() {
        for good in ["urnic0", "mlx5_0", "bnxt_re-1", "a.b", &"x".repeat(63)] {
            assert!(is_name(good), "{good}");
        }
        for bad in [
            "",
            ".",
            "..",
            ".x",
            "-d",
            "a/b",
            "a:1",
            "a,b",
            "a b",
            "é",
            "a%d",
            &"x".repeat(64),
        ] {
            assert!(!is_name(bad), "{bad}");
        }
    }
}
