//! The tables that `make interop` shows at its end, from `target/interop`.

use std::fmt::Write as _;
use std::path::PathBuf;

use urnic_tests::build::target;

/// A table in progress: its file always has the results so far.
#[derive(Debug)]
pub(crate) struct Table {
    file: PathBuf,
    title: String,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table with these heads, in a file of this name.
    pub(crate) fn new(name: &str, title: &str, heads: &[&str]) -> Self {
        let target = target();
        let folder = target
            .parent()
            .expect("a profile is in the target folder")
            .join("interop");
        std::fs::create_dir_all(&folder).expect("a folder in the target folder");
        let mut table = Self {
            file: folder.join(name).with_extension("txt"),
            title: title.to_owned(),
            rows: Vec::new(),
        };
        table.row(heads);
        table
    }

    /// Adds a row.
    pub(crate) fn row(&mut self, cells: &[&str]) {
        self.rows
            .push(cells.iter().map(|&cell| cell.to_owned()).collect());
        std::fs::write(&self.file, self.text()).expect("a file in the target folder");
    }

    fn text(&self) -> String {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or_default();
        let width = |column: usize| {
            let cells = self.rows.iter().filter_map(|row| row.get(column));
            cells.map(|cell| cell.chars().count()).max().unwrap_or_default()
        };
        let widths: Vec<usize> = (0..columns).map(width).collect();
        let mut text = format!("{}\n\n", self.title);
        for row in &self.rows {
            let mut line = String::new();
            for (cell, &width) in row.iter().zip(&widths) {
                let _ = write!(line, "{cell:width$}  ");
            }
            let _ = writeln!(text, "{}", line.trim_end());
        }
        text
    }
}
