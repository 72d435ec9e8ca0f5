//! The command blocks of a page, as its reader runs them.
//!
//! Comments of HTML, which the reader does not see, stand directly before a block and are for the
//! tests:
//!
//! ```text
//! <!-- not run: REASON -->       the block cannot run on a machine of tests
//! <!-- first: COMMAND -->        the reader has done this before
//! <!-- file: NAME -->            the reader has this block in a file
//! ```

use std::path::Path;

/// A fenced block of a page.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Block {
    /// The line of the opening fence, from 1.
    pub line: usize,
    /// The word after the fence: `sh`, `text`, or nothing.
    pub language: String,
    /// The lines between the fences.
    pub text: String,
    /// Comments directly before the block.
    notes: Vec<String>,
}

/// A command of a session, and the output that the page shows for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    /// The line after `$ `, with its continuation lines.
    pub command: String,
    /// The lines up to the next command.
    pub output: String,
}

impl Block {
    /// All blocks of a page.
    pub fn all(page: &str) -> Vec<Block> {
        let mut blocks = Vec::new();
        let mut notes = Vec::new();
        let mut lines = page.lines().enumerate();
        while let Some((at, line)) = lines.next() {
            let line = line.trim();
            if let Some(language) = line.strip_prefix("```") {
                let text: Vec<&str> = lines
                    .by_ref()
                    .map(|(_, line)| line)
                    .take_while(|line| line.trim() != "```")
                    .collect();
                blocks.push(Block {
                    line: at + 1,
                    language: language.to_owned(),
                    text: text.join("\n"),
                    notes: std::mem::take(&mut notes),
                });
            } else if let Some(note) = line.strip_prefix("<!-- ").and_then(|it| it.strip_suffix(" -->")) {
                notes.push(note.to_owned());
            } else if !line.is_empty() {
                notes.clear();
            }
        }
        blocks
    }

    /// The blocks of a page of the tree.
    pub fn of(page: &Path) -> Vec<Block> {
        let text = std::fs::read_to_string(page);
        Self::all(&text.unwrap_or_else(|error| panic!("{}: {error}", page.display())))
    }

    fn noted<'a>(&'a self, key: &'a str) -> impl Iterator<Item = &'a str> {
        let values = self.notes.iter().filter_map(move |note| note.strip_prefix(key));
        values.map(|value| value.trim_start_matches(':').trim())
    }

    /// Why the block is not run.
    pub fn not_run(&self) -> Option<&str> {
        self.noted("not run").next()
    }

    /// What the reader has done before.
    pub fn first(&self) -> Vec<&str> {
        self.noted("first").collect()
    }

    /// The file that has this block.
    pub fn file(&self) -> Option<&str> {
        self.noted("file").next()
    }

    /// Whether the block has commands only.
    pub fn is_commands(&self) -> bool {
        ["sh", "bash"].contains(&self.language.as_str())
    }

    /// Whether the block is output, or a session of commands and their output.
    pub fn is_text(&self) -> bool {
        ["", "text", "console"].contains(&self.language.as_str())
    }

    /// The commands of a session and their output; empty for other blocks.
    pub fn session(&self) -> Vec<Step> {
        let mut steps: Vec<Step> = Vec::new();
        if !self.is_text() {
            return steps;
        }
        let mut lines = self.text.lines();
        while let Some(line) = lines.next() {
            if let Some(command) = line.strip_prefix("$ ") {
                let mut command = command.to_owned();
                while command.ends_with('\\')
                    && let Some(more) = lines.next()
                {
                    command = format!("{command}\n{more}");
                }
                steps.push(Step {
                    command,
                    output: String::new(),
                });
            } else if let Some(last) = steps.last_mut() {
                last.output.push_str(line);
                last.output.push('\n');
            }
        }
        steps
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = "\
A page.

<!-- first: touch a -->
<!-- first: touch b -->
```sh
ls
```

prints:

```text
a
```
<!-- not run: needs Docker -->

```
$ docker run \\
    image
it runs
$ docker ps
```

<!-- not run: of another block -->
Words.

```toml
key = 1
```
";

    #[test]
    fn blocks_have_the_comments_directly_before_them() {
        let blocks = Block::all(PAGE);
        let [ls, output, docker, toml] = blocks.as_slice() else {
            panic!("{blocks:?}");
        };
        assert_eq!((ls.line, ls.text.as_str(), ls.is_commands()), (5, "ls", true));
        assert_eq!(ls.first(), ["touch a", "touch b"]);
        assert_eq!(ls.not_run(), None);
        assert!(output.is_text() && output.session().is_empty() && output.first().is_empty());
        assert_eq!(docker.not_run(), Some("needs Docker"));
        assert_eq!(toml.not_run(), None);
        assert!(!toml.is_text() && !toml.is_commands());
    }

    #[test]
    fn a_session_has_commands_and_their_output() {
        let steps = Block::all(PAGE)[2].session();
        let steps: Vec<_> = steps
            .iter()
            .map(|step| (step.command.as_str(), step.output.as_str()))
            .collect();
        assert_eq!(
            steps,
            [("docker run \\\n    image", "it runs\n"), ("docker ps", "")]
        );
    }
}
