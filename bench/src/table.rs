//! The table: medians over the rounds, and whether each aim was reached.

use std::fmt::Write as _;

/// The aim for the ratio of urnic's figure to the other.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Aim {
    AtMost(f64),
    AtLeast(f64),
    /// At least 1, within the spread of the ratios: the middle half of them reaches 1.
    NoSlower,
    /// No aim: the row only reports a figure.
    Report,
}

/// A figure, or the reason why there is none.
pub(crate) type Measured<T> = Result<T, String>;

/// One line of the table.
#[derive(Debug)]
pub(crate) struct Row {
    what: String,
    unit: &'static str,
    against: &'static str,
    aim: Aim,
    ours: Vec<f64>,
    theirs: Vec<f64>,
    ratios: Vec<f64>,
    /// The row also measures the other side.
    compared: bool,
    /// The reason why a round, the last such round, has no figure.
    missing: Option<String>,
}

impl Row {
    pub(crate) fn new(what: &str, unit: &'static str, against: &'static str, aim: Aim) -> Self {
        let none = Vec::new;
        Self {
            what: what.to_owned(),
            unit,
            against,
            aim,
            ours: none(),
            theirs: none(),
            ratios: none(),
            compared: false,
            missing: None,
        }
    }

    /// The name of the row.
    pub(crate) fn what(&self) -> &str {
        &self.what
    }

    /// Adds one round's figures; `None` if there is no figure to compare with.
    pub(crate) fn add(&mut self, ours: Measured<f64>, theirs: Option<Measured<f64>>) {
        self.compared |= theirs.is_some();
        let mut known = |figure: Measured<f64>| figure.map_err(|reason| self.missing = Some(reason)).ok();
        let ours = known(ours);
        let theirs = theirs.and_then(&mut known);
        self.ours.extend(ours);
        self.theirs.extend(theirs);
        self.ratios
            .extend(ours.zip(theirs).map(|(ours, theirs)| ours / theirs));
    }

    /// Whether every measurement of the row has a figure.
    fn is_measured(&self) -> bool {
        let theirs = !self.compared || !self.theirs.is_empty();
        theirs && !self.ours.is_empty()
    }

    /// The line about missing figures of the row.
    fn complaint(&self) -> Option<String> {
        let reason = self.missing.as_ref()?;
        let share = if self.is_measured() {
            "not in every round"
        } else {
            "not measured"
        };
        Some(format!("{share}: {}: {reason}\n", self.what))
    }

    fn result(&self) -> String {
        let (met, aim) = match (self.aim, median(&self.ratios)) {
            (Aim::Report, _) => return "report".to_owned(),
            (Aim::AtMost(limit), ratio) => (ratio.map(|ratio| ratio <= limit), format!("<= {limit:.2} x")),
            (Aim::AtLeast(limit), ratio) => (ratio.map(|ratio| ratio >= limit), format!(">= {limit:.2} x")),
            (Aim::NoSlower, _) => match spread(&self.ratios) {
                Some((low, high)) => (
                    Some(high >= 1.0),
                    format!(">= 1 within the spread {low:.3} .. {high:.3}"),
                ),
                None => (None, ">= 1".to_owned()),
            },
        };
        match met {
            Some(true) => format!("{aim}  met"),
            Some(false) => format!("{aim}  MISSED"),
            None => format!("{aim}  not measured"),
        }
    }
}

/// The middle value; of an even number, the mean of the two in the middle.
pub(crate) fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    let upper = sorted.get(middle).copied()?;
    if sorted.len() % 2 == 1 {
        return Some(upper);
    }
    sorted.get(middle - 1).map(|lower| (lower + upper) / 2.0)
}

/// The quartiles: half of the values are between them.
fn spread(values: &[f64]) -> Option<(f64, f64)> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let last = sorted.len().checked_sub(1)?;
    let quarter = last.div_ceil(4);
    Some((*sorted.get(quarter)?, *sorted.get(last - quarter)?))
}

/// The table, and below it the reasons for missing figures.
pub(crate) fn text(rows: &[Row]) -> String {
    let longest = |of: fn(&Row) -> &str, least| {
        let lengths = rows.iter().map(|row| of(row).chars().count() + 1);
        lengths.fold(least, usize::max)
    };
    let (first, third) = (longest(|row| &row.what, 30), longest(|row| row.against, 26));
    let mut text = format!(
        "{:<first$}{:>16}   {:<third$}{:>16}{:>9}   aim\n",
        "measured", "ours", "against", "theirs", "ratio"
    );
    for row in rows {
        let figure = |values: &[f64]| {
            median(values).map_or_else(
                || "-".to_owned(),
                |value| format!("{} {}", short(value), row.unit),
            )
        };
        let ratio = median(&row.ratios).map_or_else(|| "-".to_owned(), |ratio| format!("{ratio:.2} x"));
        let (ours, theirs) = (figure(&row.ours), figure(&row.theirs));
        let _ = writeln!(
            text,
            "{:<first$}{ours:>16}   {:<third$}{theirs:>16}{ratio:>9}   {}",
            row.what,
            row.against,
            row.result()
        );
    }
    text.extend(rows.iter().filter_map(Row::complaint));
    text
}

/// Whether every row has its figures.
pub(crate) fn is_complete(rows: &[Row]) -> bool {
    rows.iter().all(Row::is_measured)
}

/// Three significant digits, or all digits before the point.
fn short(value: f64) -> String {
    let decimals = if value >= 100.0 {
        0
    } else if value >= 10.0 {
        1
    } else {
        2
    };
    format!("{value:.decimals$}")
}

/// Runs a measurement. A panic becomes an error with the reason, so that the others still run.
pub(crate) fn tried<T>(measurement: impl FnOnce() -> Measured<T>) -> Measured<T> {
    // Nothing that a measurement borrows is used after a panic.
    let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(measurement));
    outcome.unwrap_or_else(|panic| {
        let message = panic
            .downcast_ref::<String>()
            .map(String::as_str)
            .or_else(|| panic.downcast_ref::<&str>().copied());
        let line = message.and_then(|message| message.lines().next());
        Err(line.unwrap_or("it failed").to_owned())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_without_figures_has_a_reason() {
        let mut rows = [
            Row::new("x", "us", "y", Aim::Report),
            Row::new("z", "us", "", Aim::Report),
        ];
        assert!(!is_complete(&rows));
        rows[1].add(Ok(1.0), None);
        rows[0].add(Ok(1.0), Some(Err("rping is not installed".to_owned())));
        assert!(!is_complete(&rows));
        let output = text(&rows);
        assert!(
            output.ends_with("\nnot measured: x: rping is not installed\n"),
            "{output}"
        );
        rows[0].add(Ok(1.0), Some(Ok(2.0)));
        assert!(is_complete(&rows));
        assert!(
            text(&rows).contains("not in every round: x: rping"),
            "{}",
            text(&rows)
        );
    }

    #[test]
    fn medians() {
        assert_eq!(median(&[]), None);
        assert_eq!(median(&[3.0]), Some(3.0));
        assert_eq!(median(&[3.0, 1.0]), Some(2.0));
        assert_eq!(median(&[9.0, 1.0, 2.0]), Some(2.0));
    }

    #[test]
    fn no_slower_allows_for_the_spread() {
        let result = |ratios: &[f64]| {
            let mut row = Row::new("x", "GB/s", "y", Aim::NoSlower);
            ratios.iter().for_each(|ratio| row.add(Ok(*ratio), Some(Ok(1.0))));
            row.result()
        };
        assert!(result(&[]).ends_with("not measured"));
        assert!(result(&[0.97, 0.98, 0.99, 1.01, 1.02]).ends_with("1.010  met"));
        assert!(result(&[0.97, 0.98, 0.98, 0.99, 1.02]).ends_with("0.990  MISSED"));
    }

    #[test]
    fn an_aim_applies_to_the_median_of_the_ratios() {
        let mut row = Row::new("x", "us", "y", Aim::AtMost(1.25));
        assert!(row.result().ends_with("not measured"));
        for ours in [1.0, 1.2, 9.0] {
            row.add(Ok(ours), Some(Ok(1.0)));
        }
        assert!(row.result().ends_with("met"));
        row.add(Ok(2.0), Some(Ok(1.0)));
        row.add(Err("it broke".to_owned()), Some(Ok(1.0)));
        assert!(row.result().ends_with("MISSED"), "{}", row.result());
    }
}
