//! The dialogue with a C program: lines in, answers out.

use std::collections::HashMap;

use crate::program::{Program, Running};

/// A program that executes lines and answers each with a line that begins with "= ".
#[derive(Debug)]
pub(super) struct CommandProcess {
    pub(super) program: Running,
    /// How much of the output has been read as answers, in bytes.
    consumed: usize,
}

impl CommandProcess {
    /// Starts the C program `name`.
    pub(super) fn start(
        name: &str,
        variables: &[(&str, &str)],
        place: impl FnOnce(Program) -> Program,
    ) -> Result<Self, String> {
        let program = Program::new(crate::compiled(name)?);
        let program = variables
            .iter()
            .fold(program, |program, (name, value)| program.env(name, value));
        Ok(Self {
            program: place(program).spawn(),
            consumed: 0,
        })
    }

    /// Waits for the next line that the program answers.
    #[track_caller]
    pub(super) fn answer(&mut self) -> String {
        let (line, consumed) = self
            .program
            .wait_for_output_from(self.consumed, "an answer", |output| {
                let mut consumed = 0;
                for line in output.split_inclusive('\n') {
                    consumed += line.len();
                    if let Some(answer) = line.strip_prefix("= ") {
                        return Some((answer.trim_end().to_owned(), consumed));
                    }
                }
                None
            });
        self.consumed += consumed;
        line
    }

    /// Sends a command and waits for its answer.
    #[track_caller]
    pub(super) fn command(&mut self, line: &str) -> String {
        self.program.write_stdin(&format!("{line}\n"));
        self.answer()
    }

    /// Sends a command; returns the numbers of its answer by their names.
    #[track_caller]
    pub(super) fn query(&mut self, line: &str) -> impl Fn(&str) -> u64 + use<> {
        let answer = self.command(line);
        let fields = fields(&answer);
        move |name| match fields.get(name).map(|text| u64::from_str_radix(text, 16)) {
            Some(Ok(number)) => number,
            _ => panic!("no {name} in {answer}"),
        }
    }
}

/// The words `name=value` of an answer, by name.
pub(super) fn fields(answer: &str) -> HashMap<String, String> {
    answer
        .split_whitespace()
        .filter_map(|word| word.split_once('='))
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect()
}
