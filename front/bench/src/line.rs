//! Straight lines through measured points, by least squares.

/// A line through points.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Line {
    /// Increase on the second axis for each step of 1 on the first.
    pub slope: f64,
    /// The value on the second axis where the first is 0.
    pub base: f64,
    /// Root of the mean square of the points' distances from the line along the second axis.
    pub residual: f64,
    /// The greatest of these distances.
    pub farthest: f64,
}

impl Line {
    /// Returns the line of least squares through `points`, or `None` if they have the same first
    /// number.
    pub fn through(points: &[(f64, f64)]) -> Option<Self> {
        let count = points.len() as f64;
        let sum = |of: fn(&(f64, f64)) -> f64| points.iter().map(of).sum::<f64>();
        let (x, y) = (sum(|point| point.0), sum(|point| point.1));
        let (xx, xy) = (sum(|point| point.0 * point.0), sum(|point| point.0 * point.1));
        let spread = count * xx - x * x;
        if spread <= 0.0 {
            return None;
        }
        let slope = (count * xy - x * y) / spread;
        let base = (y - slope * x) / count;
        let distances = points.iter().map(|(at, value)| (value - base - slope * at).abs());
        let squares: f64 = distances.clone().map(|distance| distance * distance).sum();
        let farthest = distances.fold(0.0, f64::max);
        Some(Self { slope, base, residual: (squares / count).sqrt(), farthest })
    }

    /// Returns the line's value at `place` on the first axis.
    pub fn at(&self, place: f64) -> f64 {
        self.base + self.slope * place
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn points_on_a_line_give_it_back() {
        let line = Line::through(&[(1.0, 10.0), (2.0, 12.0), (3.0, 14.0)]).unwrap();
        assert_eq!((line.slope, line.base), (2.0, 8.0));
        assert_eq!((line.residual, line.farthest), (0.0, 0.0));
        assert_eq!(line.at(2000.0), 4008.0);
    }

    #[test]
    fn distances_from_the_line_are_its_residual() {
        let line = Line::through(&[(0.0, 1.0), (1.0, -1.0), (2.0, -1.0), (3.0, 1.0)]).unwrap();
        assert_eq!((line.slope, line.base), (0.0, 0.0));
        assert_eq!((line.residual, line.farthest), (1.0, 1.0));
    }

    #[test]
    fn a_line_needs_two_places() {
        assert_eq!(Line::through(&[]), None);
        assert_eq!(Line::through(&[(1.0, 10.0), (1.0, 11.0)]), None);
    }
}
