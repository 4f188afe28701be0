//! Operations of which a number goes on at once.

use std::future::poll_fn;
use std::pin::Pin;
use std::task::Poll;

/// Completes all of `futures`, at most `most` (at least 1) of them at a time, on the calling task.
/// Returns their results in the order in which they came.
pub async fn some_at_once<F: Future>(
    futures: impl IntoIterator<Item = F>,
    most: usize,
) -> Vec<F::Output> {
    let mut waiting = futures.into_iter();
    let (mut running, mut done) = (Vec::<Pin<Box<F>>>::new(), Vec::new());
    poll_fn(|context| {
        loop {
            let free = most.max(1) - running.len();
            running.extend(waiting.by_ref().take(free).map(Box::pin));
            let before = running.len();
            running.retain_mut(|one| match one.as_mut().poll(context) {
                Poll::Ready(result) => {
                    done.push(result);
                    false
                }
                Poll::Pending => true,
            });
            if running.is_empty() && before == 0 {
                return Poll::Ready(());
            }
            if running.len() == before {
                return Poll::Pending;
            }
        }
    })
    .await;
    done
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use tokio::sync::oneshot;

    use super::*;

    #[tokio::test]
    async fn a_slow_one_holds_up_no_other_and_no_more_than_some_go_on() {
        let (end, ended) = oneshot::channel();
        let (mut end, mut ended) = (Some(end), Some(ended));
        let (going, most, through) = (Cell::new(0), Cell::new(0), Cell::new(0));
        let one = |number: u32| {
            // The first one ends when the last one does.
            let waits = (number == 0).then(|| ended.take()).flatten();
            let ends = (number == 19).then(|| end.take()).flatten();
            let (going, most, through) = (&going, &most, &through);
            async move {
                going.set(going.get() + 1);
                most.set(most.get().max(going.get()));
                tokio::task::yield_now().await;
                if let Some(ended) = waits {
                    let () = ended.await.unwrap();
                }
                if let Some(end) = ends {
                    end.send(()).unwrap();
                }
                going.set(going.get() - 1);
                through.set(through.get() + 1);
                number
            }
        };
        let done = some_at_once((0..20).map(one), 3).await;
        assert_eq!((done.len(), most.get(), through.get()), (20, 3, 20));
        assert_eq!(done.last(), Some(&0), "{done:?}");
        assert!(some_at_once(std::iter::empty::<std::future::Ready<()>>(), 3).await.is_empty());
    }
}
