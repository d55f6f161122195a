        small, main, newcomer = self._small, self._main, self._newcomer
        most, done = self._small_places, set()
        left_small, left_main = len(small), len(main)
        inserted = len(self) > self.capacity
        if inserted:
            done.add(newcomer)
            if newcomer in small:
                most += 1
                left_small -= 1
            else:
                left_main -= 1
        while left_small or left_main:
            in_small = left_small > 0 and (left_small >= most or not left_main)
            queue = small if in_small else main
            item, uses = next(iter(queue.items()))
            if item in done:
                queue.move_to_end(item)
            elif in_small and uses > 1:
                del small[item]
                main[item] = 0
                left_small -= 1
                left_main += 1
            elif not in_small and uses:
                main[item] = uses - 1
                main.move_to_end(item)
            else:
                yield item
                done.add(item)
                queue.move_to_end(item)
                if in_small:
                    left_small -= 1
                else:
                    left_main -= 1
        if inserted:
            yield newcomer
