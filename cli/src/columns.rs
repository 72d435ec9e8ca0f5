//! Tables for terminals: which columns have room, and how wide they are.

/// A column of a table.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Column {
    pub(crate) title: &'static str,
    /// Columns of a higher rank are left out first; those of rank 0 never.
    pub(crate) rank: u8,
    pub(crate) kind: Kind,
}

/// The kind of a column's cells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Aligned to the left.
    Text,
    /// Aligned to the right.
    Number,
    /// Text that may be cut beyond 15 characters, the length of a kernel's name of a program; it
    /// gets the room that no other column needs.
    Long,
}

/// The least width of [`Kind::Long`], if a cell is that long.
const LONG: usize = 15;
/// The least width of [`Kind::Number`]: numbers that change by a digit would move the table.
const NUMBER: usize = 4;

impl Column {
    pub(crate) const fn text(title: &'static str, rank: u8) -> Column {
        let kind = Kind::Text;
        Column { title, rank, kind }
    }

    pub(crate) const fn number(title: &'static str, rank: u8) -> Column {
        let kind = Kind::Number;
        Column { title, rank, kind }
    }

    pub(crate) const fn long(title: &'static str, rank: u8) -> Column {
        let kind = Kind::Long;
        Column { title, rank, kind }
    }
}

/// A column that is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shown {
    /// The column's index among all columns.
    pub(crate) index: usize,
    pub(crate) width: usize,
}

/// The columns of a table that find room, with `gap` characters between two. `room` is the width of
/// the terminal; `None`: there is no limit.
pub(crate) fn fitting(
    columns: &[Column],
    rows: &[Vec<String>],
    gap: usize,
    room: Option<usize>,
) -> Vec<Shown> {
    let longest = |index: usize, column: &Column| {
        let cells = rows.iter().filter_map(|row| row.get(index));
        let lengths = cells.map(|cell| cell.chars().count());
        let least = if column.kind == Kind::Number { NUMBER } else { 0 };
        let title = column.title.chars().count();
        lengths.fold(title.max(least), usize::max)
    };
    let mut shown = Vec::new();
    for (index, column) in columns.iter().enumerate() {
        let width = longest(index, column);
        let least = match (column.kind, room) {
            (Kind::Long, Some(_)) => width.min(LONG),
            _ => width,
        };
        shown.push((column, width, Shown { index, width: least }));
    }
    let room = room.unwrap_or(usize::MAX);
    // Columns of one rank, such as two directions, are left out together.
    let mut ranks: Vec<u8> = columns.iter().map(|column| column.rank).collect();
    ranks.sort_unstable();
    ranks.dedup();
    let mut chosen = 0;
    let mut fits = Vec::new();
    for rank in ranks {
        let of_rank = shown.iter().filter(|(column, ..)| column.rank == rank);
        let needed = of_rank.map(|(.., shown)| shown.width + gap).sum::<usize>();
        // The last column has no gap after it.
        if rank == 0 || chosen + needed <= room.saturating_add(gap) {
            chosen += needed;
            fits.push(rank);
        }
    }
    shown.retain(|(column, ..)| fits.contains(&column.rank));
    let mut left = room.saturating_add(gap).saturating_sub(chosen);
    let wide = shown.into_iter().map(|(_, width, mut shown)| {
        let more = (width - shown.width).min(left);
        left -= more;
        shown.width += more;
        shown
    });
    wide.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const COLUMNS: [Column; 5] = [
        Column::number("PID", 0),
        Column::long("COMMAND", 0),
        Column::text("DEVICE", 2),
        Column::number("TX", 1),
        Column::number("RX", 1),
    ];

    fn row(command: &str) -> Vec<String> {
        ["12345", command, "urnic0", "9999", "10.0k"]
            .map(str::to_owned)
            .to_vec()
    }

    fn widths(command: &str, room: Option<usize>) -> Vec<(usize, usize)> {
        let shown = fitting(&COLUMNS, &[row(command)], 1, room);
        shown.iter().map(|shown| (shown.index, shown.width)).collect()
    }

    #[test]
    fn columns_of_a_high_rank_are_left_out_first() {
        let all = [(0, 5), (1, 7), (2, 6), (3, 4), (4, 5)];
        assert_eq!(widths("sh", None), all);
        assert_eq!(widths("sh", Some(31)), all);
        assert_eq!(widths("sh", Some(30)), [(0, 5), (1, 7), (3, 4), (4, 5)]);
        // Both directions are left out; a later column may find room.
        assert_eq!(widths("sh", Some(23)), [(0, 5), (1, 7), (2, 6)]);
        assert_eq!(widths("sh", Some(3)), [(0, 5), (1, 7)]);
    }

    #[test]
    fn long_text_gets_the_room_that_is_left() {
        let command = "program-of-15-c with arguments";
        assert_eq!(widths(command, Some(21))[1], (1, 15));
        assert_eq!(widths(command, Some(40))[1], (1, 16));
        assert_eq!(widths(command, Some(100))[1], (1, 30));
        assert_eq!(widths(command, None)[1], (1, 30));
    }
}
