"""What an engine was measured to do, as planner, simulator and capacity planning look it up; pure."""
