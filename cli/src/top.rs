//! `urnic top`: processes, queue pairs and their rates on a terminal, live.

mod sample;
mod state;
mod view;

use std::io::IsTerminal as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use urnic_config::Config;
use urnic_driver::watch;

use crate::answer::Failure;
use crate::command_line;
use crate::signals;
use crate::stat;
use state::{Next, State};

/// The longest wait for the terminal, so that a signal ends the view soon.
const TURN: Duration = Duration::from_millis(200);

#[derive(Debug, clap::Args)]
pub(crate) struct ViewArgs {
    /// The time between two updates
    #[arg(long, value_name = "SECONDS", value_parser = stat::seconds, default_value = "1")]
    interval: Duration,
}

/// Shows the view until the user or a signal ends it.
pub(crate) fn show(args: &ViewArgs) -> Result<ExitCode, Failure> {
    if !std::io::stdout().is_terminal() || !std::io::stdin().is_terminal() {
        return Err(Failure::usage(
            "top needs a terminal; `urnic stat` prints to files and pipes",
        ));
    }
    let config = Config::from_env().map_err(Failure::usage)?;
    let homes = watch::homes(config.present.dir);
    let stop = signals::as_descriptor().map_err(Failure::runtime)?;
    let mut terminal =
        ratatui::try_init().map_err(|error| Failure::runtime(format!("the terminal: {error}")))?;
    let outcome = run(&mut terminal, &homes, args.interval, &stop);
    ratatui::restore();
    outcome.map_err(|error| Failure::runtime(format!("the terminal: {error}")))?;
    Ok(ExitCode::SUCCESS)
}

fn run(
    terminal: &mut DefaultTerminal,
    homes: &[PathBuf],
    interval: Duration,
    stop: &OwnedFd,
) -> std::io::Result<()> {
    let mut state = State::default();
    // `None`: so late that it never comes.
    let mut due = Some(Instant::now());
    loop {
        if due.is_some_and(|due| Instant::now() >= due) {
            let mut snapshots = watch::snapshots(homes, None);
            for one in &mut snapshots {
                one.command = command_line::of_process(one.pid, &one.command);
            }
            let now = Instant::now();
            state.take(snapshots, now);
            due = now.checked_add(interval);
        }
        terminal.draw(|frame| view::draw(frame, &state))?;
        let left = due.map(|due| due.saturating_duration_since(Instant::now()));
        let wait = left.unwrap_or(TURN).min(TURN);
        if event::poll(wait)?
            && let Event::Key(key) = event::read()?
            && state.key(key) == Next::Quit
        {
            return Ok(());
        }
        let signalled = rustix::event::poll(
            &mut [PollFd::new(stop, PollFlags::IN)],
            Some(&Timespec::default()),
        );
        match signalled {
            Ok(0) | Err(Errno::INTR) => {}
            Ok(_) => return Ok(()),
            Err(errno) => return Err(errno.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;
    use ratatui::crossterm::event::{KeyCode, KeyEvent};
    use urnic_driver::watch::{Failure, QueuePair, Snapshot};

    use super::*;

    fn snapshot(pid: u32, bytes: u64) -> Snapshot {
        let counters = [("tx_bytes", bytes), ("tx_messages", 3), ("rx_terminates", 1)];
        let counters: std::collections::BTreeMap<String, u64> = counters
            .into_iter()
            .map(|(name, value)| (name.to_owned(), value))
            .collect();
        Snapshot {
            pid,
            command: format!("program{pid}"),
            name: "urnic0".to_owned(),
            device: "loopback".to_owned(),
            memory: "direct".to_owned(),
            contexts: 1,
            completion_queues: 1,
            counters: counters.clone(),
            failures: vec![Failure {
                opcode: "SEND".to_owned(),
                status: "REM_OP_ERR".to_owned(),
                vendor_err: 0,
                count: 1,
            }],
            last_refusal: None,
            queue_pairs: vec![QueuePair {
                qpn: 0xabc,
                state: "RTS".to_owned(),
                rdma_cm: true,
                bytes: Some("memory".to_owned()),
                local: None,
                remote: Some("192.0.2.7:7471".to_owned()),
                terminate_sent: 0,
                terminate_received: 0x1100_c000,
                send_blocks: 17,
                receives: 29,
                transfer_len: 1 << 30,
                transfer_done: 3 << 28,
                counters,
            }],
        }
    }

    fn text(state: &State) -> String {
        text_at(state, 150)
    }

    /// The text on a terminal of this width.
    fn text_at(state: &State, width: u16) -> String {
        let mut terminal = Terminal::new(TestBackend::new(width, 24)).unwrap();
        terminal.draw(|frame| view::draw(frame, state)).unwrap();
        let buffer = terminal.backend().buffer();
        let rows = buffer.content().chunks(buffer.area.width.into());
        let row =
            |cells: &[ratatui::buffer::Cell]| cells.iter().map(|cell| cell.symbol()).collect::<String>();
        rows.map(row).collect::<Vec<String>>().join("\n")
    }

    fn press(state: &mut State, code: KeyCode) -> Next {
        state.key(KeyEvent::from(code))
    }

    /// Two samples of two processes, with half a second between.
    fn two_samples() -> State {
        let mut state = State::default();
        let begin = Instant::now();
        state.take(vec![snapshot(1, 1_000), snapshot(2, 0)], begin);
        let later = begin + Duration::from_millis(500);
        state.take(vec![snapshot(1, 1_000), snapshot(2, 45_000)], later);
        state
    }

    #[test]
    fn the_list_has_rates_of_the_time_that_passed() {
        let state = two_samples();
        let text = text(&state);
        let busy = text.lines().find(|line| line.contains("program2")).unwrap();
        assert!(busy.contains("90.0k"), "{busy}");
    }

    /// The process numbers of the list, and that of the selection.
    fn listed(state: &State) -> (Vec<u32>, u32) {
        let order = state.order.iter().map(|device| device.pid).collect();
        (order, state.selected_device().expect("a device").pid)
    }

    #[test]
    fn rows_keep_their_places_while_rates_change() {
        let mut state = State::default();
        let begin = Instant::now();
        let take = |state: &mut State, second: u64, bytes: [u64; 3]| {
            let all = [1, 2, 3].map(|pid| snapshot(pid, bytes[pid as usize - 1]));
            state.take(all.to_vec(), begin + Duration::from_secs(second));
        };
        take(&mut state, 0, [0; 3]);
        take(&mut state, 1, [100, 1000, 1100]);
        assert_eq!(listed(&state), (vec![1, 2, 3], 1), "by process");
        press(&mut state, KeyCode::Char('s'));
        assert_eq!(
            listed(&state),
            (vec![2, 3, 1], 1),
            "by rate, and the selection stays"
        );
        // About the same rates, in turn.
        for second in 2..20 {
            let more = second % 2 * 300;
            take(
                &mut state,
                second,
                [100 * second, 1000 * second, 1000 * second + more],
            );
            assert_eq!(listed(&state), (vec![2, 3, 1], 1), "second {second}");
        }
        take(&mut state, 20, [100_000, 20_000, 20_000]);
        assert_eq!(listed(&state), (vec![1, 2, 3], 1), "clearly more");
        take(&mut state, 21, [100_000, 21_000, 21_000]);
        press(&mut state, KeyCode::Char('s'));
        press(&mut state, KeyCode::Char('s'));
        assert_eq!(listed(&state), (vec![1, 2, 3], 1), "by process again");
    }

    #[test]
    fn the_selection_stays_with_its_queue_pair() {
        let mut state = State::default();
        let mut one = snapshot(1, 0);
        let pair = |qpn| QueuePair {
            qpn,
            ..snapshot(1, 0).queue_pairs[0].clone()
        };
        one.queue_pairs = [1, 2, 3].map(pair).to_vec();
        state.take(vec![one.clone()], Instant::now());
        press(&mut state, KeyCode::Enter);
        press(&mut state, KeyCode::Down);
        press(&mut state, KeyCode::Down);
        one.queue_pairs.remove(0);
        state.take(vec![one.clone()], Instant::now());
        assert_eq!(state.detail.as_ref().map(|(_, row)| *row), Some(1));
        one.queue_pairs.clear();
        state.take(vec![one], Instant::now());
        assert!(text(&state).contains("0 queue pairs"));
    }

    #[test]
    fn no_name_or_number_is_cut_at_usual_widths() {
        let mut state = State::default();
        let mut one = snapshot(4_194_303, 1_000_000_000);
        one.command = "fifteen-letters --with arguments".to_owned();
        one.queue_pairs[0].qpn = 0xff_ff01;
        one.queue_pairs[0].remote = Some("192.168.100.201:42144".to_owned());
        let mut plain = one.clone();
        plain.queue_pairs[0].terminate_received = 0;
        let begin = Instant::now();
        state.take(vec![one.clone()], begin);
        state.take(vec![one], begin + Duration::from_secs(1));
        for (width, columns) in [
            (80, "PID DEVICE COMMAND QPS TX-B/S RX-B/S TX-M/S RX-M/S ERRORS"),
            (
                100,
                "PID DEVICE COMMAND QPS TX-B/S RX-B/S TX-M/S RX-M/S TX-BYTES RX-BYTES ERRORS",
            ),
            (
                200,
                "PID DEVICE COMMAND QPS TX-B/S RX-B/S TX-M/S RX-M/S TX-BYTES RX-BYTES ERRORS",
            ),
        ] {
            state.detail = None;
            let list = text_at(&state, width);
            let titles: Vec<&str> = list.lines().nth(1).unwrap().split_whitespace().collect();
            assert_eq!(titles.join(" "), columns, "{width}: {list}");
            for whole in ["4194303", "urnic0", "fifteen-letters", "q quit"] {
                assert!(list.contains(whole), "{width}: {whole} is not in {list}");
            }
            assert_eq!(list.contains("--with arguments"), width == 200, "{list}");
            press(&mut state, KeyCode::Enter);
            let pairs = text_at(&state, width);
            for whole in ["0xffff01", "RTS", "192.168.100.201:42144", "got 0x1100c000"] {
                assert!(pairs.contains(whole), "{width}: {whole} is not in {pairs}");
            }
        }
        state.take(vec![plain], begin + Duration::from_secs(2));
        let pairs = text_at(&state, 80);
        assert!(
            pairs.contains("rdma_cm memory") && !pairs.contains("TERMINATE"),
            "{pairs}"
        );
    }

    #[test]
    fn the_help_fits_80_columns() {
        let mut state = two_samples();
        press(&mut state, KeyCode::Char('h'));
        assert_eq!(
            text_at(&state, 80).split_whitespace().collect::<Vec<_>>()[7..],
            text_at(&state, 300).split_whitespace().collect::<Vec<_>>()[7..]
        );
    }

    #[test]
    fn a_device_opens_to_its_queue_pairs_and_failures() {
        let mut state = two_samples();
        press(&mut state, KeyCode::Enter);
        let shown = text(&state);
        for part in [
            "program1",
            "0x000abc",
            "17",
            "29",
            "75% of 1.1G",
            "192.0.2.7:7471",
            "got 0x1100c000",
            "1 SEND REM_OP_ERR",
        ] {
            assert!(shown.contains(part), "{part} is not in\n{shown}");
        }
        press(&mut state, KeyCode::Esc);
        assert!(text(&state).contains("program2"));
    }

    #[test]
    fn the_end_of_a_process_leaves_the_view_complete() {
        let mut state = two_samples();
        press(&mut state, KeyCode::Down);
        press(&mut state, KeyCode::Enter);
        state.take(Vec::new(), Instant::now());
        assert!(text(&state).contains("has ended"));
        press(&mut state, KeyCode::Down);
        press(&mut state, KeyCode::Esc);
        press(&mut state, KeyCode::Enter);
        assert!(text(&state).contains("no process of yours"));
    }

    #[test]
    fn a_paused_view_stands_still() {
        let mut state = two_samples();
        press(&mut state, KeyCode::Char('p'));
        let before = text(&state);
        assert!(before.contains("paused"));
        state.take(Vec::new(), Instant::now());
        assert_eq!(text(&state), before);
        assert_eq!(press(&mut state, KeyCode::Char('q')), Next::Quit);
    }

    #[test]
    fn every_size_of_a_terminal_will_do() {
        let mut state = two_samples();
        for detail in [None, Some((state.order[0].clone(), 0))] {
            state.detail = detail;
            for (width, height) in [(1, 1), (3, 2), (20, 5), (300, 80)] {
                let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
                terminal.draw(|frame| view::draw(frame, &state)).unwrap();
            }
        }
    }

    #[test]
    fn names_of_other_processes_are_escaped() {
        let mut state = State::default();
        let mut one = snapshot(1, 1_000);
        one.command = "\u{1b}[2J".to_owned();
        one.name = "\u{202e}0".to_owned();
        one.queue_pairs[0].state = "a\nb".to_owned();
        state.take(vec![one], Instant::now());
        let list = text(&state);
        assert!(list.contains("\\u{1b}[2J") && list.contains("\\u{202e"), "{list}");
        press(&mut state, KeyCode::Enter);
        let pairs = text(&state);
        assert!(pairs.contains("a\\nb") && !pairs.contains('\u{202e}'), "{pairs}");
    }
}
