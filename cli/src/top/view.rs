//! The view: tables and curves.

use ratatui::Frame;
use ratatui::layout::{Alignment, Constraint, Layout, Rect};
use ratatui::style::{Modifier, Style, Stylize as _};
use ratatui::text::{Line, Text};
use ratatui::widgets::{Paragraph, Row, Sparkline, Table, TableState};
use urnic_console::escaped;
use urnic_driver::watch::{QueuePair, Snapshot};

use super::sample::Device;
use super::state::State;
use crate::columns::{Column, Kind, fitting};
use crate::stat::{amount, counted, errors, terminate, value};

const KEYS: &str = "Up/Down select  Enter queue pairs  Esc back  s order  p pause  h help  q quit";

/// No line is longer than 80 characters.
const HELP: &str = "\
The list has the devices of your processes. Enter shows the queue pairs of one,
Esc leads back. Columns for which the terminal is too narrow are left out.

QPS              queue pairs
TX-B/S, RX-B/S   bytes per second to and from streams
TX-M/S, RX-M/S   messages per second
TX-BYTES, ...    bytes since the device was opened
ERRORS           CRC and marker errors, lost streams, Terminates sent and
                 received, overflows of completion queues
SQ               blocks of 64 B of the send queue that are not complete: one or
                 more for each request
RQ               receives that are posted and free
TRANSFER         how far the oldest Read is, or else the message that is sent
VIA              who connected, and the way of the bytes: TCP, or memory that
                 both ends share
TERMINATE        why a connection ended; `urnic explain` says what it means

s changes the order of the list: by process, rate, errors. p stops and
continues.";

/// Draws all of it.
pub(super) fn draw(frame: &mut Frame<'_>, state: &State) {
    let [title, body, keys] =
        Layout::vertical([Constraint::Length(1), Constraint::Min(0), Constraint::Length(1)])
            .areas(frame.area());
    frame.render_widget(Line::from(heading(state)).bold(), title);
    frame.render_widget(Line::from(KEYS).dim(), keys);
    match &state.detail {
        _ if state.help => frame.render_widget(Paragraph::new(HELP), body),
        Some((device, selected)) => match state.now.of(device) {
            Some(one) => pairs(frame, body, state, device, one, *selected),
            None => frame.render_widget(format!("process {} has ended", device.pid), body),
        },
        None => list(frame, body, state),
    }
}

fn heading(state: &State) -> String {
    let total = |counter| {
        let rates = state.now.devices();
        let rates = rates.filter_map(|device| state.now.rate(&state.before, &device, counter));
        amount(rates.fold(0.0, |sum, rate| sum + rate))
    };
    let paused = if state.paused { "   paused" } else { "" };
    format!(
        "urnic top   {}   {} B/s out   {} B/s in   by {}{paused}",
        counted(state.now.devices().count() as u64, "device"),
        total("tx_bytes"),
        total("rx_bytes"),
        state.sort.name()
    )
}

/// A rate in a cell.
fn cell(rate: Option<f64>) -> String {
    rate.map_or_else(|| "-".to_owned(), amount)
}

/// The counters that are shown by their rates.
const RATES: [&str; 4] = ["tx_bytes", "rx_bytes", "tx_messages", "rx_messages"];

fn list(frame: &mut Frame<'_>, area: Rect, state: &State) {
    let Some(selected) = state.selected_device() else {
        frame.render_widget("no process of yours has a urnic device open", area);
        return;
    };
    let present = state
        .order
        .iter()
        .filter_map(|device| Some((device, state.now.of(device)?)));
    let rows = present.map(|(device, one)| {
        let mut row = vec![
            one.pid.to_string(),
            escaped(&one.name),
            escaped(&one.command),
            one.queue_pairs.len().to_string(),
        ];
        row.extend(RATES.map(|counter| cell(state.now.rate(&state.before, device, counter))));
        row.extend(["tx_bytes", "rx_bytes"].map(|name| amount(value(&one.counters, name) as f64)));
        row.push(errors(&one.counters).to_string());
        row
    });
    let columns = [
        Column::number("PID", 0),
        Column::text("DEVICE", 1),
        Column::long("COMMAND", 0),
        Column::number("QPS", 1),
        Column::number("TX-B/S", 0),
        Column::number("RX-B/S", 0),
        Column::number("TX-M/S", 2),
        Column::number("RX-M/S", 2),
        Column::number("TX-BYTES", 3),
        Column::number("RX-BYTES", 3),
        Column::number("ERRORS", 0),
    ];
    let [above, curve] = Layout::vertical([Constraint::Min(0), Constraint::Length(3)]).areas(area);
    let is_faulty = |row: &[String]| row.last().is_some_and(|errors| errors != "0");
    table(
        frame,
        above,
        &columns,
        &rows.collect::<Vec<_>>(),
        state.selected,
        is_faulty,
    );
    curve_of(frame, curve, state, &selected);
}

/// The bytes per second of a device as a curve.
fn curve_of(frame: &mut Frame<'_>, area: Rect, state: &State, device: &Device) {
    let rates = state.rates.get(device).map_or(&[][..], Vec::as_slice);
    let last = rates
        .get(rates.len().saturating_sub(area.width.into())..)
        .unwrap_or_default();
    let most = last.iter().copied().max().unwrap_or(0);
    let [name, curve] = Layout::vertical([Constraint::Length(1), Constraint::Min(0)]).areas(area);
    let title = format!(
        "{} of process {}: up to {} B/s",
        escaped(&device.name),
        device.pid,
        amount(most as f64)
    );
    frame.render_widget(Line::from(title).dim(), name);
    frame.render_widget(Sparkline::default().data(last), curve);
}

fn pairs(frame: &mut Frame<'_>, area: Rect, state: &State, device: &Device, one: &Snapshot, selected: usize) {
    let failures = u16::try_from(one.failures.len())
        .unwrap_or(u16::MAX)
        .min(area.height / 3);
    let [about, above, failed, curve] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Min(0),
        Constraint::Length(failures),
        Constraint::Length(3),
    ])
    .areas(area);
    let about_it = format!(
        "process {}, {}: {}, {}: {}",
        one.pid,
        escaped(&one.name),
        counted(one.queue_pairs.len() as u64, "queue pair"),
        counted(one.completion_queues, "completion queue"),
        escaped(&one.command)
    );
    frame.render_widget(about_it, about);
    let rows = one.queue_pairs.iter().map(|pair| pair_row(state, device, pair));
    let rows: Vec<Vec<String>> = rows.collect();
    let has_terminate = rows.iter().any(|row| row.last().is_some_and(|cell| cell != "-"));
    let columns = [
        Column::number("QPN", 0),
        Column::text("STATE", 0),
        Column::text("PEER", 0),
        Column::number("TX-B/S", 0),
        Column::number("RX-B/S", 0),
        Column::number("SQ", 2),
        Column::number("RQ", 2),
        Column::text("VIA", 3),
        Column::number("TX-M/S", 4),
        Column::number("RX-M/S", 4),
        Column::text("TRANSFER", 5),
        Column::text("TERMINATE", if has_terminate { 1 } else { 6 }),
    ];
    table(frame, above, &columns, &rows, selected, |_| false);
    let failures: Vec<Line<'_>> = one
        .failures
        .iter()
        .map(|failure| Line::from(escaped(&failure.to_string())).red())
        .collect();
    frame.render_widget(Paragraph::new(failures), failed);
    curve_of(frame, curve, state, device);
}

fn pair_row(state: &State, device: &Device, pair: &QueuePair) -> Vec<String> {
    let way = pair.bytes.as_deref().unwrap_or("-");
    let who = if pair.rdma_cm { "rdma_cm" } else { "native" };
    let [tx_bytes, rx_bytes, tx_messages, rx_messages] =
        RATES.map(|counter| cell(state.now.pair_rate(&state.before, device, pair, counter)));
    vec![
        format!("{:#08x}", pair.qpn),
        escaped(&pair.state),
        pair.remote.as_deref().map_or_else(|| "-".to_owned(), escaped),
        tx_bytes,
        rx_bytes,
        pair.send_blocks.to_string(),
        pair.receives.to_string(),
        escaped(&format!("{who} {way}")),
        tx_messages,
        rx_messages,
        transfer(pair),
        terminate(pair),
    ]
}

/// The progress of the current transfer, and its length.
fn transfer(pair: &QueuePair) -> String {
    let (done, len) = (u64::from(pair.transfer_done), pair.transfer_len);
    match (done * 100).checked_div(len.into()) {
        Some(percent) => format!("{percent}% of {}", amount(len.into())),
        None => "-".to_owned(),
    }
}

/// Draws a table with the columns that find room. Rows that are `marked` are red.
fn table(
    frame: &mut Frame<'_>,
    area: Rect,
    columns: &[Column],
    rows: &[Vec<String>],
    selected: usize,
    marked: impl Fn(&[String]) -> bool,
) {
    let shown = fitting(columns, rows, 1, Some(area.width.into()));
    let cell = |index: usize, text: String| {
        let alignment = match columns[index].kind {
            Kind::Number => Alignment::Right,
            Kind::Text | Kind::Long => Alignment::Left,
        };
        Text::from(text).alignment(alignment)
    };
    let titles = shown
        .iter()
        .map(|of| cell(of.index, columns[of.index].title.to_owned()));
    let body = rows.iter().map(|row| {
        let cells = shown.iter().map(|of| cell(of.index, row[of.index].clone()));
        let drawn = Row::new(cells);
        if marked(row) { drawn.red() } else { drawn }
    });
    let widths = shown
        .iter()
        .map(|of| Constraint::Length(u16::try_from(of.width).unwrap_or(u16::MAX)));
    let mut state = TableState::new().with_selected(selected.min(rows.len().saturating_sub(1)));
    let table = Table::new(body, widths)
        .header(Row::new(titles).bold())
        .row_highlight_style(Style::new().add_modifier(Modifier::REVERSED));
    frame.render_stateful_widget(table, area, &mut state);
}
