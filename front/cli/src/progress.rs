//! Progress of long operations, shown on a terminal only.

use std::collections::HashMap;
use std::fmt::Display;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};
use slipway_bench::Turn;
use slipway_image::{Event, Progress};

fn style(template: &str) -> ProgressStyle {
    // The templates are constants of this file; an invalid one falls back to the default bar.
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}

/// Returns a spinner that names the stage of a start; with `count` above 1, also how many run
/// already.
pub fn stage_spinner(count: u32) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(count.into()), ProgressDrawTarget::stderr());
    bar.set_style(style(match count {
        1 => "{spinner} {elapsed} {msg}",
        _ => "{spinner} {elapsed} {pos}/{len} run; {msg}",
    }));
    bar.enable_steady_tick(Duration::from_millis(100));
    bar
}

/// Returns a spinner that names what is waited for.
pub fn waiting(what: &'static str) -> ProgressBar {
    let bar = stage_spinner(1);
    bar.set_message(what);
    bar
}

/// Returns a bar for the turns of a benchmark.
pub fn turns() -> ProgressBar {
    let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
    bar.set_style(style("{elapsed} [{bar:30}] {pos}/{len} {eta} left {msg}"));
    bar
}

/// Shows a turn that is about to begin.
pub fn turn<L: Display>(bar: &ProgressBar, turn: &Turn<'_, L>) {
    bar.set_length(turn.turns as u64);
    bar.set_position(turn.done as u64);
    bar.set_message(format!("{} {}", turn.load, turn.subject));
}

/// Shows the progress of fetching an image: one bar for each layer.
pub struct Fetch {
    bars: MultiProgress,
    state: Mutex<Bars>,
}

#[derive(Default)]
struct Bars {
    layers: HashMap<usize, ProgressBar>,
    whole: Option<ProgressBar>,
}

impl Fetch {
    /// Makes a display on standard error, which draws only if that is a terminal.
    pub fn new() -> Arc<Self> {
        let bars = MultiProgress::with_draw_target(ProgressDrawTarget::stderr());
        Arc::new(Self { bars, state: Mutex::default() })
    }

    fn spinner(&self, state: &mut Bars, text: String) {
        let bar = state.whole.get_or_insert_with(|| {
            let bar = self.bars.add(ProgressBar::new_spinner());
            bar.enable_steady_tick(Duration::from_millis(100));
            bar
        });
        bar.set_style(style("{spinner} {msg}"));
        bar.set_message(text);
    }
}

impl Progress for Fetch {
    fn event(&self, event: Event<'_>) {
        let mut state = self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        match event {
            Event::Resolving(reference) => {
                self.spinner(&mut state, format!("asking for {reference}"));
            }
            Event::Waiting(digest) => {
                self.spinner(&mut state, format!("another process fetches {}", digest.short()));
            }
            Event::LayerStarted { index, digest, bytes } => {
                let bar = self.bars.add(ProgressBar::new(bytes));
                bar.set_style(style("  {msg} [{bar:30}] {bytes}/{total_bytes} {bytes_per_sec}"));
                bar.set_message(digest.short());
                state.layers.insert(index, bar);
            }
            Event::LayerBytes { index, done } => {
                if let Some(bar) = state.layers.get(&index) {
                    bar.set_position(done);
                }
            }
            Event::LayerFinished { index } => {
                if let Some(bar) = state.layers.remove(&index) {
                    bar.finish_and_clear();
                }
            }
            Event::Merging => self.spinner(&mut state, "merging layers".to_owned()),
            Event::Building { done, total } => {
                let percent = (done * 100).checked_div(total).unwrap_or(100);
                self.spinner(&mut state, format!("building the file system, {percent} %"));
            }
            Event::Finished(_) => {
                if let Some(bar) = state.whole.take() {
                    bar.finish_and_clear();
                }
            }
            _ => {}
        }
    }
}
