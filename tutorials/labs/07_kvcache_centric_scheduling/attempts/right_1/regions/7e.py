        alone, per_other = mean_tbt_terms(state, request)
        waiting = state.held.sequences if request.request_id not in state.held else 0
        room = max(0, state.decode_slots - request.n)

        def search(tbt: float, steps: int) -> float:
            predicted = state.decode_load.sequences(now + ttft, now, tbt)
            found = alone + per_other * min(room, predicted + waiting)
            if steps == 1 or found >= tbt:
                return found
            return search(found, steps - 1)

        present = alone + per_other * state.decode_load.running
        return search(max(present, request.slo_tbt_s), STEPS)
